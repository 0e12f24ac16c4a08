// What a lookup costs its caller: the call against one of the same payload that does nothing, over a Unix
// socket.
//
//   bench_lookup unix:/tmp/s [PAGES=100000] [BLOCKS=2048] [CALLS=2000]
//
// The daemon needs --host-store-bytes of at least PAGES * 256. The call that does nothing is a ReleaseLease
// of no lease with the hashes in a field that it does not know.
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "client/client.h"
#include "client/session.h"
#include "kvsummary/v1/prefix.grpc.pb.h"
#include "kvsummary/v1/session.grpc.pb.h"

namespace kvsummary {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kHashWidth = 32;
constexpr int kUnknownField = 1000;

template <typename T>
T Must(absl::StatusOr<T> value) {
  if (value.ok()) return *std::move(value);
  std::fprintf(stderr, "bench_lookup: %s\n", std::string(value.status().message()).c_str());
  std::exit(1);
}

std::string Hashes(std::int64_t first, std::int64_t count) {
  std::string hashes(static_cast<std::size_t>(count) * kHashWidth, '\0');
  for (std::int64_t i = 0; i < count; ++i) {
    std::uint64_t x = static_cast<std::uint64_t>(first + i) + 1;
    for (int word = 0; word < kHashWidth / 8; ++word) {
      x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9 + 0x9e3779b97f4a7c15;
      x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
      std::memcpy(hashes.data() + i * kHashWidth + word * 8, &x, sizeof(x));
    }
  }
  return hashes;
}

double PercentileUs(std::vector<double>& us, double part) {
  const auto nth = us.begin() + static_cast<std::ptrdiff_t>(part * static_cast<double>(us.size() - 1));
  std::nth_element(us.begin(), nth, us.end());
  return *nth;
}

int Run(const std::string& address, std::int64_t pages, std::int64_t blocks, std::int64_t calls) {
  // One prefix of all pages, published a part at a time from a small cache.
  constexpr std::int64_t kPart = 4096;
  const auto client = Must(Client::Connect(address));
  const auto session = Must(client->OpenSession("bench"));
  const auto cache = Must(session->CreateCache(
      "bench", "host", {.layers = 1, .blocks = kPart + 1, .block_size = 8, .ring_blocks = 2, .capacity = 8}));
  const auto name_space = Must(session->DeclareNamespace(
      {.identity = {.model = "bench", .layers = 1, .block_size = 8}, .groups = {{.bytes_per_block = 256}}}));
  if (auto s = session->BindCache(cache, name_space, {}); !s.ok()) Must<int>(s);
  std::vector<std::int64_t> ids;
  for (std::int64_t i = 1; i <= kPart; ++i) ids.push_back(i);
  for (std::int64_t first = 0; first < pages; first += kPart) {
    const std::int64_t count = std::min(kPart, pages - first);
    const GroupBlocks group{.blocks = std::span(ids).first(static_cast<std::size_t>(count))};
    const std::string parent = first == 0 ? "" : Hashes(first - 1, 1);
    const std::string hashes = Hashes(first, count);
    Must(session->Publish(cache, name_space,
                          {.committed_tokens = (first + count) * 8,
                           .first_block_index = first,
                           .parent_hash = parent,
                           .hashes = hashes,
                           .groups = std::span(&group, 1)}));
  }

  const auto channel = grpc::CreateChannel(address, grpc::InsecureChannelCredentials());
  const auto stub = v1::PrefixService::NewStub(channel);
  const auto sessions = v1::SessionService::NewStub(channel);
  grpc::ClientContext open_context;
  v1::OpenRequest open;
  open.set_name("bench");
  const auto stream = sessions->Open(&open_context, open);
  v1::OpenResponse opened;
  stream->Read(&opened);
  v1::LookupRequest lookup;
  lookup.set_session_id(opened.opened().session_id());
  lookup.set_hashes(Hashes(0, blocks));
  lookup.set_device("host");
  {
    v1::DeclareNamespaceRequest declare;
    declare.set_session_id(lookup.session_id());
    declare.mutable_identity()->set_model("bench");
    declare.mutable_identity()->set_layers(1);
    declare.mutable_identity()->set_block_size(8);
    declare.mutable_identity()->set_shard_count(1);
    declare.set_hash_width(kHashWidth);
    auto* group = declare.add_groups();
    group->set_kind(v1::GROUP_KIND_FULL);
    group->set_bytes_per_block(256);
    grpc::ClientContext context;
    v1::DeclareNamespaceResponse reply;
    stub->DeclareNamespace(&context, declare, &reply);
    lookup.set_namespace_id(reply.namespace_id());
  }
  v1::ReleaseLeaseRequest nothing;
  nothing.set_session_id(lookup.session_id());
  nothing.GetReflection()->MutableUnknownFields(&nothing)->AddLengthDelimited(kUnknownField, lookup.hashes());
  v1::ReleaseLeaseRequest release;
  release.set_session_id(lookup.session_id());

  std::vector<double> lookup_us;
  std::vector<double> nothing_us;
  v1::LookupResponse hit;
  v1::ReleaseLeaseResponse released;
  const auto timed = [](std::vector<double>& us, const auto& call) {
    grpc::ClientContext context;
    const auto start = Clock::now();
    const grpc::Status status = call(&context);
    us.push_back(std::chrono::duration<double, std::micro>(Clock::now() - start).count());
    if (!status.ok()) {
      std::fprintf(stderr, "bench_lookup: %s\n", status.error_message().c_str());
      std::exit(1);
    }
  };
  for (std::int64_t i = 0; i < calls; ++i) {
    timed(lookup_us, [&](grpc::ClientContext* c) { return stub->Lookup(c, lookup, &hit); });
    timed(nothing_us, [&](grpc::ClientContext* c) { return stub->ReleaseLease(c, nothing, &released); });
    release.set_lease_id(hit.lease_id());
    grpc::ClientContext context;
    stub->ReleaseLease(&context, release, &released);
  }
  open_context.TryCancel();
  if (auto s = client->DeleteCache(cache); !s.ok()) Must<int>(s);
  std::printf("%ld pages, %ld hashes of %d bytes, %ld found, %ld calls\n", pages, blocks, kHashWidth,
              static_cast<long>(hit.hit_blocks()), calls);
  for (const double part : {0.1, 0.5}) {  // the lower one is less disturbed by what else runs
    const double found = PercentileUs(lookup_us, part);
    const double none = PercentileUs(nothing_us, part);
    std::printf("p%.0f: lookup %.1f us, no-op of the same payload %.1f us, difference %.1f us\n", part * 100,
                found, none, found - none);
  }
  return hit.hit_blocks() == blocks ? 0 : 1;
}

}  // namespace
}  // namespace kvsummary

int main(int argc, char** argv) {
  if (argc < 2) return std::fprintf(stderr, "usage: bench_lookup ADDRESS [PAGES] [BLOCKS] [CALLS]\n"), 2;
  const auto number = [&](int i, std::int64_t fallback) { return argc > i ? std::atoll(argv[i]) : fallback; };
  return kvsummary::Run(argv[1], number(2, 100'000), number(3, 2048), number(4, 2000));
}
