#include <cstdio>
#include <vector>

#include "client/session.h"
#include "tests/gpu/daemon_check.h"

namespace kvsummary::gpu {
namespace {

constexpr CacheGeometry kGeometry{.layers = 3,
                                  .blocks = 65,
                                  .block_size = 64,
                                  .block_stride = 3 * 2048,
                                  .ring_blocks = 65,
                                  .capacity = 10,
                                  .rows_per_layer = 10,
                                  .k = 3};

std::string Hex(const std::string& bytes) {
  std::string text;
  for (const char c : bytes) {
    char digits[3];
    std::snprintf(digits, sizeof(digits), "%02x", static_cast<unsigned char>(c));
    text += digits;
  }
  return text;
}

}  // namespace

int HoldSession(const CheckOptions& options, const std::vector<std::string>& wanted) {
  const auto client = Client::Connect(options.address);
  if (!client.ok()) return Fail("connect", client.status());
  const auto session = (*client)->OpenSession("hold");
  if (!session.ok()) return Fail("OpenSession", session.status());
  std::vector<Cache> caches;
  for (const std::string& word : wanted) {
    const auto equals = word.find('=');
    const std::string device = equals == std::string::npos ? "" : word.substr(equals + 1);
    const auto cache = (*session)->CreateCache(word.substr(0, equals), device, kGeometry);
    if (!cache.ok()) return Fail("CreateCache", cache.status());
    caches.push_back(*cache);
    const auto memory = (*session)->ExportMemory(*cache);
    if (!memory.ok()) return Fail("ExportMemory", memory.status());
    const CacheGeometry& g = cache->geometry;
    std::printf(
        "{\"name\": \"%s\", \"socket\": \"%s\", \"kind\": %d, \"handle\": \"%s\", \"size_bytes\": %lld, "
        "\"offset_bytes\": %lld, \"device_uuid\": \"%s\", \"pid_namespace\": %llu, \"generation\": %llu, "
        "\"layers\": %d, \"blocks\": %lld, \"block_size\": %d, \"block_stride\": %lld, \"ring_blocks\": "
        "%lld, "
        "\"capacity\": %d, \"rows_per_layer\": %d, \"k\": %d}\n",
        cache->name.c_str(), (*session)->descriptor_socket().c_str(), static_cast<int>(memory->kind),
        Hex(memory->handle).c_str(), static_cast<long long>(memory->size_bytes),
        static_cast<long long>(memory->offset_bytes), memory->device_uuid.c_str(),
        static_cast<unsigned long long>(memory->pid_namespace),
        static_cast<unsigned long long>(memory->generation), g.layers, static_cast<long long>(g.blocks),
        g.block_size, static_cast<long long>(g.block_stride), static_cast<long long>(g.ring_blocks),
        g.capacity, g.rows_per_layer, g.k);
    std::fflush(stdout);
  }
  while (std::getchar() != EOF) {
  }
  for (const Cache& cache : caches) {
    if (const auto s = (*session)->ReleaseMemory(cache); !s.ok()) return Fail("ReleaseMemory", s);
    if (const auto s = (*client)->DeleteCache(cache); !s.ok()) return Fail("DeleteCache", s);
  }
  return 0;
}

}  // namespace kvsummary::gpu
