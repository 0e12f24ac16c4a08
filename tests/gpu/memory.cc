#include <cstdio>
#include <numeric>
#include <optional>
#include <vector>

#include "client/session.h"
#include "client/status.h"
#include "tests/gpu/daemon_check.h"

namespace kvsummary::gpu {
namespace {

// What the driver itself takes when a process opens the GPU, context or not, and its rounding.
constexpr long long kSlackBytes = 4 << 20;
constexpr std::int64_t kTokens = 56 * 1024;  // of a step beyond the daemon's staging memory

constexpr CacheGeometry kGeometry{.layers = 1,
                                  .blocks = 65'536,
                                  .block_size = 64,
                                  .block_stride = 2048,
                                  .ring_blocks = 2,
                                  .capacity = 10,
                                  .rows_per_layer = 10,
                                  .k = 3};

absl::StatusOr<DeviceInfo> Device(Client& client, const std::string& name) {
  auto info = client.GetServerInfo();
  if (!info.ok()) return info.status();
  for (DeviceInfo& d : info->devices) {
    if (d.name == name) return d;
  }
  return absl::NotFoundError("no such device");
}

absl::Status LargeStep(Client& client, const Cache& cache) {
  std::vector<std::int64_t> slots(kTokens), positions(kTokens);
  const std::vector<std::int64_t> bases(kTokens, cache.geometry.rows_per_block());
  std::iota(positions.begin(), positions.end(), 0);
  std::iota(slots.begin(), slots.end(), 64);
  const std::vector<std::int32_t> starts = {0, static_cast<std::int32_t>(kTokens)};
  const std::vector<std::uint16_t> rows(static_cast<std::size_t>(kTokens * kRowElements));
  return client.Prefill(cache, {0, 1}, {slots, positions, starts, bases, rows}).status();
}

}  // namespace

int CheckMemory(const CheckOptions& options) {
  const auto first = Client::Connect(options.address);
  if (!first.ok()) return Fail("connect", first.status());
  Client::Options limits;
  const auto server = (*first)->GetServerInfo();
  if (!server.ok()) return Fail("GetServerInfo", server.status());
  limits.max_message_bytes = server->max_message_bytes;
  const auto client = Client::Connect(options.address, limits);
  if (!client.ok()) return Fail("connect", client.status());

  bool good = true;
  std::optional<DeviceInfo> device;
  // Tells what is taken, and compares with what may be.
  const auto look = [&](const char* when, bool may_have_context) -> absl::Status {
    const auto now = Device(**client, options.device);
    if (!now.ok()) return now.status();
    device = *now;
    const long long used = UsedGpuBytes(**client, options.device);
    const long long taken = used - options.before_bytes;
    const long long announced = device->used_bytes + device->overhead_bytes;
    std::printf(
        "%s: the GPU has %lld bytes more in use; announced: caches %lld + overhead %lld, budget %lld\n", when,
        taken, static_cast<long long>(device->used_bytes), static_cast<long long>(device->overhead_bytes),
        static_cast<long long>(device->budget_bytes));
    if (used < 0 || options.before_bytes < 0) {
      std::printf("FAIL nobody tells the memory in use (libnvidia-ml)\n");
      good = false;
    } else if (taken > announced + kSlackBytes) {
      std::printf("FAIL more is taken than announced\n");
      good = false;
    } else if (device->used_bytes > device->budget_bytes && may_have_context) {
      std::printf("FAIL caches take more than the budget\n");
      good = false;
    } else if (may_have_context && device->overhead_bytes == 0) {
      std::printf("FAIL no overhead is announced\n");
      good = false;
    } else if (!may_have_context && announced != 0) {
      std::printf("FAIL something is announced before the first cache\n");
      good = false;
    }
    return absl::OkStatus();
  };

  if (const auto s = look("before the first cache", false); !s.ok()) return Fail("ListDevices", s);
  std::vector<Cache> caches;
  for (int i = 0; i < 4; ++i) {
    const auto cache = (*client)->CreateCache("memory/" + std::to_string(i), options.device, kGeometry);
    if (!cache.ok()) return Fail("CreateCache", cache.status());
    caches.push_back(*cache);
    if (const auto s = look(("with " + std::to_string(i + 1) + " caches").c_str(), true); !s.ok())
      return Fail("ListDevices", s);
  }
  for (int i = 0; i < 5; ++i) {
    if (const auto s = LargeStep(**client, caches[0]); !s.ok()) return Fail("a large step", s);
  }
  if (const auto s = look("after large steps", true); !s.ok()) return Fail("ListDevices", s);
  for (const Cache& cache : caches) {
    if (const auto s = (*client)->DeleteCache(cache); !s.ok()) return Fail("DeleteCache", s);
  }
  if (const auto s = look("without caches", true); !s.ok()) return Fail("ListDevices", s);
  std::printf("%s: overhead %lld MiB, pinned host memory %lld MiB\n",
              good ? "as announced" : "NOT as announced",
              static_cast<long long>(device->overhead_bytes >> 20),
              static_cast<long long>(device->pinned_host_bytes >> 20));
  return good ? 0 : 1;
}

}  // namespace kvsummary::gpu
