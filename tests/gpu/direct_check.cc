// Checks the direct plane between two processes on a GPU: this one maps caches of a daemon and updates them,
// the daemon reads the same pages back.
//
//   direct_check [--device=cuda:N]       (the daemon: $SUMMARYD_ADDRESS)
//
// The last line is `N passed, N failed`; exit status 1 on a failure, 2 on a CUDA error.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "client/client.h"
#include "client/direct/direct.h"
#include "client/plane.h"
#include "client/session.h"
#include "client/status.h"
#include "kernels/update.h"
#include "tests/gpu/device.h"

namespace kvsummary::gpu {
namespace {

constexpr CacheGeometry kGeometry{.layers = 3,
                                  .blocks = 65,
                                  .block_size = 64,
                                  .block_stride = 3 * 2048 + 256,
                                  .ring_blocks = 65,
                                  .capacity = 10,
                                  .rows_per_layer = 11,
                                  .k = 3};
constexpr int kRequests = 64;
constexpr LayerSpan kAll{0, 3};

// A cache of the daemon's that this process has mapped, and its twin: the same steps by the scalar kernels.
struct Mapped {
  std::unique_ptr<ClientSession> session;
  Cache cache;
  ExportedMemory memory;
  DirectCache direct;
  std::vector<std::uint8_t> twin;
};

// The decode step of every request at one position; in device memory, and here for the twin.
class Step {
 public:
  Step(int position, const Stream& stream)
      : slots_(kRequests), positions_(kRequests, position), bases_(kRequests), memory_(kBytes) {
    for (int r = 0; r < kRequests; ++r) {
      slots_[r] = (r + 1) * kGeometry.block_size + position;
      bases_[r] = (r + 1) * kGeometry.rows_per_block();
    }
    std::mt19937 random(position + 1);
    rows_.resize(kAll.count * kRequests * kRowElements);
    for (auto& v : rows_) v = static_cast<std::uint16_t>(0x3e80 + random() % 0x180 + (random() & 1) * 0x8000);
    std::vector<char> all(kBytes);
    std::memcpy(all.data(), slots_.data(), kArray);
    std::memcpy(all.data() + kArray, positions_.data(), kArray);
    std::memcpy(all.data() + 2 * kArray, bases_.data(), kArray);
    std::memcpy(all.data() + 3 * kArray, rows_.data(), rows_.size() * 2);
    memory_.Upload(all.data(), all.size(), stream);
    stream.Synchronize();
  }

  DecodeStep OnDevice() const {
    const char* at = static_cast<const char*>(memory_.get());
    const auto array = [&](int i) { return reinterpret_cast<const std::int64_t*>(at + i * kArray); };
    return {kRequests, PackedRows(at + 3 * kArray, kRequests), array(0), array(1), array(2)};
  }
  DecodeStep OnHost() const {
    return {kRequests, PackedRows(rows_.data(), kRequests), slots_.data(), positions_.data(), bases_.data()};
  }

 private:
  static constexpr std::size_t kArray = kRequests * sizeof(std::int64_t);
  static constexpr std::size_t kBytes = 3 * kArray + kAll.count * kRequests * std::size_t{kRowBytes};
  std::vector<std::int64_t> slots_, positions_, bases_;
  std::vector<std::uint16_t> rows_;
  DeviceMemory memory_;
};

class Checks {
 public:
  Checks(Client& client, std::string device) : client_(client), device_(std::move(device)) {}

  int Run() {
    Check("the first launch is in a capture (VMM)", [this] { return Captured(HandleKind::kCudaVmm); });
    Check("captured (IPC)", [this] { return Captured(HandleKind::kCudaIpc); });
    Check("another process reads every byte (VMM)", [this] { return Updates(HandleKind::kCudaVmm); });
    Check("another process reads every byte (IPC)", [this] { return Updates(HandleKind::kCudaIpc); });
    Check("an open handle is opened again in a microsecond", [this] { return OpenAgain(); });
    Check("misaligned rows are refused", [this] { return Misaligned(); });
    Check("a device that is not visible, and a handle that is none, are named",
          [this] { return NoSuchThing(); });
    Check("map and unmap, 50 times", [this] { return MapInALoop(); });
    Check("the cost of a launch", [this] { return LaunchCost(); });
    std::printf("%d passed, %d failed\n", passed_, failed_);
    return failed_ ? 1 : 0;
  }

 private:
  // An empty text is a pass.
  void Check(const char* name, const std::function<std::string()>& check) {
    const std::string why = check();
    std::printf("%s %s%s%s\n", why.empty() ? "PASS" : "FAIL", name, why.empty() ? "" : ": ", why.c_str());
    std::fflush(stdout);
    ++(why.empty() ? passed_ : failed_);
  }

  std::string Map(HandleKind kind, Mapped* mapped) {
    auto session = client_.OpenSession("direct_check");
    if (!session.ok()) return Describe(session.status());
    mapped->session = *std::move(session);
    const auto cache =
        mapped->session->CreateCache("direct_check/" + std::to_string(++caches_), device_, kGeometry, kind);
    if (!cache.ok()) return Describe(cache.status());
    mapped->cache = *cache;
    const auto memory = mapped->session->ExportMemory(*cache);
    if (!memory.ok()) return Describe(memory.status());
    mapped->memory = *memory;
    mapped->twin.resize(static_cast<std::size_t>(kGeometry.total_bytes()));
    return Text(mapped->direct.Map(MapArguments(*mapped->session, mapped->cache, mapped->memory)));
  }
  std::string Unmap(Mapped* mapped) {
    mapped->direct = DirectCache();
    if (auto s = mapped->session->ReleaseMemory(mapped->cache); !s.ok()) return Describe(s);
    if (auto s = client_.DeleteCache(mapped->cache); !s.ok()) return Describe(s);
    return "";
  }
  static std::string Text(const PlainStatus& status) {
    return status.ok() ? "" : status.reason + " " + status.message;
  }

  void OnTwin(Mapped& mapped, const Step& step) {
    ScalarKernels().Decode(MakeView(kGeometry, mapped.twin.data(), kAll), step.OnHost(), {});
  }

  // Compares what the daemon reads with the twin.
  std::string Compare(const Mapped& mapped) {
    std::vector<std::int64_t> blocks(kGeometry.blocks);
    std::iota(blocks.begin(), blocks.end(), 0);
    const auto pages = client_.ReadPages(mapped.cache, blocks, kAll);
    if (!pages.ok()) return Describe(pages.status());
    const auto page = static_cast<std::size_t>(kGeometry.page_bytes());
    const std::uint8_t* at = pages->data();
    std::size_t written = 0;
    for (const std::int64_t block : blocks) {
      for (int layer = 0; layer < kAll.count; ++layer, at += page) {
        const std::uint8_t* want = mapped.twin.data() + kGeometry.page_offset(block, layer);
        if (std::memcmp(at, want, page) != 0) {
          return "block " + std::to_string(block) + " of layer " + std::to_string(layer) + " differs";
        }
        for (std::size_t i = 0; i < page; ++i) written += at[i] != 0 ? 1 : 0;
      }
    }
    return written > 0 ? "" : "nothing was written";
  }

  std::string Captured(HandleKind kind) {
    Mapped mapped;
    if (auto why = Map(kind, &mapped); !why.empty()) return why;
    std::vector<std::unique_ptr<Step>> steps;
    for (int p = 0; p < 8; ++p) steps.push_back(std::make_unique<Step>(p, stream_));
    std::string why;
    const Graph graph(stream_, [&] {
      for (const auto& step : steps) {
        if (why.empty()) why = Text(mapped.direct.Decode(kAll, step->OnDevice(), {.stream = stream_.get()}));
      }
    });
    if (!why.empty()) return why;
    graph.Replay();
    stream_.Synchronize();
    for (const auto& step : steps) OnTwin(mapped, *step);
    why = Compare(mapped);
    const auto unmapped = Unmap(&mapped);
    return why.empty() ? unmapped : why;
  }

  std::string Updates(HandleKind kind) {
    Mapped mapped;
    if (auto why = Map(kind, &mapped); !why.empty()) return why;
    for (int p = 0; p < kGeometry.block_size; ++p) {
      const Step step(p, stream_);
      const auto why = Text(mapped.direct.Decode(kAll, step.OnDevice(), {.stream = stream_.get()}));
      if (!why.empty()) return why;
      stream_.Synchronize();
      OnTwin(mapped, step);
      if (p % kRegionTokens == kRegionTokens - 1) {
        if (auto differs = Compare(mapped); !differs.empty()) return differs;
      }
    }
    return Unmap(&mapped);
  }

  std::string OpenAgain() {
    Mapped mapped;
    if (auto why = Map(HandleKind::kCudaVmm, &mapped); !why.empty()) return why;
    const kvs_map_args arguments = MapArguments(*mapped.session, mapped.cache, mapped.memory);
    constexpr int kOpens = 100'000;
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < kOpens; ++i) {
      DirectCache again;
      if (auto why = Text(again.Map(arguments)); !why.empty()) return why;
    }
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
    std::printf("     %.3f us an open\n", took.count() / kOpens);
    if (took.count() / kOpens > 1) return "slower than a microsecond";
    return Unmap(&mapped);
  }

  std::string Misaligned() {
    Mapped mapped;
    if (auto why = Map(HandleKind::kCudaVmm, &mapped); !why.empty()) return why;
    const Step step(0, stream_);
    DecodeStep odd = step.OnDevice();
    odd.in.key += 1;
    if (mapped.direct.Decode(kAll, odd, {.stream = stream_.get()}).reason != "BUFFER_RANGE")
      return "a pointer";
    odd = step.OnDevice();
    odd.in.z_stride += 1;
    if (mapped.direct.Decode(kAll, odd, {.stream = stream_.get()}).reason != "BUFFER_RANGE")
      return "a stride";
    return Unmap(&mapped);
  }

  std::string NoSuchThing() {
    Mapped mapped;
    if (auto why = Map(HandleKind::kCudaIpc, &mapped); !why.empty()) return why;
    kvs_map_args arguments = MapArguments(*mapped.session, mapped.cache, mapped.memory);
    arguments.device_uuid = "GPU-00000000-0000-0000-0000-000000000000";
    DirectCache nowhere;
    const auto status = nowhere.Map(arguments);
    if (status.reason != "DEVICE_NOT_VISIBLE") return "refused with '" + status.reason + "'";
    const std::string wrong(64, 'x');
    arguments = MapArguments(*mapped.session, mapped.cache, mapped.memory);
    arguments.handle = wrong.data();
    if (const auto rubbish = nowhere.Map(arguments); rubbish.reason != "HANDLE_INVALID") {
      return "rubbish for a handle: '" + rubbish.reason + "' " + rubbish.message;
    }
    return Unmap(&mapped);
  }

  std::string MapInALoop() {
    Mapped mapped;
    if (auto why = Map(HandleKind::kCudaVmm, &mapped); !why.empty()) return why;
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < 50; ++i) {
      mapped.direct = DirectCache();
      const auto memory = mapped.session->ExportMemory(mapped.cache);
      if (!memory.ok()) return Describe(memory.status());
      mapped.memory = *memory;
      const auto status = mapped.direct.Map(MapArguments(*mapped.session, mapped.cache, mapped.memory));
      if (!status.ok()) return Text(status);
    }
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
    std::printf("     %.0f us to export, map and unmap\n", took.count() / 50);
    return Unmap(&mapped);
  }

  // Launches one after the other, of both kinds in turn; the times are of the host until the stream is done.
  std::string LaunchCost() {
    Mapped mapped;
    if (auto why = Map(HandleKind::kCudaVmm, &mapped); !why.empty()) return why;
    const DeviceMemory own(static_cast<std::size_t>(kGeometry.total_bytes()));
    const CacheView view = MakeView(kGeometry, own.get(), kAll);
    const Step step(3, stream_);
    const DecodeStep decode = step.OnDevice();
    const Launch launch{.stream = stream_.get()};
    std::vector<double> plain, direct;
    for (int i = 0; i < 2000; ++i) {
      plain.push_back(Time([&] { CudaKernels()->Decode(view, decode, launch); }));
      direct.push_back(Time([&] { static_cast<void>(mapped.direct.Decode(kAll, decode, launch)); }));
    }
    std::sort(plain.begin(), plain.end());
    std::sort(direct.begin(), direct.end());
    const double difference = direct[1000] - plain[1000];
    std::printf("     kernel %.2f us, direct %.2f us: %.2f us more (p50 of 2000)\n", plain[1000],
                direct[1000], difference);
    if (difference > 2.5) return "more than 2.5 us";
    return Unmap(&mapped);
  }
  template <typename Body>
  double Time(Body body) const {
    const auto start = std::chrono::steady_clock::now();
    body();
    stream_.Synchronize();
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count();
  }

  Client& client_;
  const std::string device_;
  const Stream stream_;
  int caches_ = 0;
  int passed_ = 0, failed_ = 0;
};

}  // namespace
}  // namespace kvsummary::gpu

int main(int argc, char** argv) {
  std::string device = "cuda:0";
  if (argc == 2 && std::strncmp(argv[1], "--device=", 9) == 0) device = argv[1] + 9;
  const char* address = std::getenv("SUMMARYD_ADDRESS");
  const auto client = kvsummary::Client::Connect(address == nullptr ? "" : address);
  if (!client.ok()) {
    std::fprintf(stderr, "direct_check: %s\n", kvsummary::Describe(client.status()).c_str());
    return 1;
  }
  return kvsummary::gpu::Checks(**client, device).Run();
}
