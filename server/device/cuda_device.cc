// A CUDA device through the runtime API. One stream; every call waits for it, so that memory given to a call
// may go when the call returns.
//
// All that a device takes besides caches is taken at Open and stays: the context, two halves of pinned host
// memory (server/device/staging.h) and the stage, device memory for steps that kernels should not read over
// the bus. Only a step beyond the stage takes more, out of the budget, for as long as it runs.
//
// Bytes cross the bus in one piece: a small step is read by the kernel from pinned memory, a larger one
// copied to the stage first, at once or half by half; pages are gathered into pinned memory and scattered
// from it.
#include <cuda_runtime_api.h>

#include <atomic>
#include <bit>
#include <chrono>
#include <cstring>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/copy.h"
#include "kernels/cuda_probe.h"
#include "kernels/exp.h"
#include "server/device/cuda_memory.h"
#include "server/device/cuda_pages.h"
#include "server/device/cuda_pinned_buffers.h"
#include "server/device/device.h"
#include "server/device/granules.h"
#include "server/device/nvml.h"
#include "server/device/packed_step.h"
#include "server/device/staging.h"
#include "server/error.h"

namespace kvsummary {
namespace {

constexpr double kDefaultBudgetShare = 0.8;
constexpr std::int64_t kProbeArguments = 1 << 20;

constexpr std::int64_t kHalfBytes = 4 << 20;
constexpr std::int64_t kStageBytes = 32 << 20;
// Steps up to this size are read over the bus by the kernel: that takes less time than a copy and its launch.
constexpr std::int64_t kInPlaceBytes = 512 << 10;
// What the executor polls after a step, for the next one of the same engine.
constexpr std::chrono::microseconds kPoll{200};
static_assert(kInPlaceBytes <= kHalfBytes);
static_assert(kHalfBytes % PackedStep::kPartAlignment == 0);
static_assert(kProbeArguments * sizeof(float) <= kStageBytes);

std::int64_t Aligned(std::int64_t bytes) { return (bytes + 255) / 256 * 256; }

bool AlignedForKernels(const RowsView& rows) {
  const auto bits = reinterpret_cast<std::uintptr_t>(rows.key) | reinterpret_cast<std::uintptr_t>(rows.z);
  const std::int64_t strides =
      rows.key_stride | rows.z_stride | rows.key_layer_stride | rows.z_layer_stride;  // of 2 bytes
  return bits % 16 == 0 && strides % 8 == 0;
}

std::string Uuid(const cudaUUID_t& uuid) {
  std::string text = "GPU-";
  for (int i = 0; i < 16; ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    absl::StrAppendFormat(&text, "%02x", static_cast<unsigned char>(uuid.bytes[i]));
  }
  return text;
}

class CudaDevice final : public Device, private Staging::Fences {
 public:
  CudaDevice(int ordinal, const cudaDeviceProp& properties, std::int64_t budget_bytes)
      : Device(absl::StrCat("cuda:", ordinal), budget_bytes, {.poll = kPoll}),
        id_{name(), ordinal, std::strstr(properties.name, " MIG ") != nullptr},
        share_of_free_(budget_bytes == 0),
        description_(absl::StrFormat("%s, sm_%d%d", properties.name, properties.major, properties.minor)),
        uuid_(Uuid(properties.uuid)),
        ipc_handles_(id_) {}

  ~CudaDevice() override {
    if (stream_ == nullptr) return;
    // Not on the executor's thread: without this, freeing would make a context on device 0.
    cudaSetDevice(id_.ordinal);
    cudaStreamSynchronize(stream_);
    cudaFree(stage_);
    cudaFreeHost(pinned_);
    pages_.Free();
    for (cudaEvent_t fence : fences_) {
      if (fence != nullptr) cudaEventDestroy(fence);
    }
    cudaStreamDestroy(stream_);
  }

  std::string description() const override { return description_; }
  std::string uuid() const override { return uuid_; }
  Overhead overhead() const override { return {overhead_bytes_, pinned_bytes_ + client_buffers_.bytes()}; }

  absl::StatusOr<std::int64_t> AllocationBytes(std::int64_t bytes, MemoryKind kind) const override {
    return CudaAllocationBytes(id_, bytes, OrDefault(kind));
  }

  absl::StatusOr<std::unique_ptr<Memory>> Allocate(std::int64_t bytes, MemoryKind kind) override {
    auto memory =
        OrDefault(kind) == MemoryKind::kCudaIpc ? AllocateCudaIpc(id_, bytes) : AllocateCudaVmm(id_, bytes);
    if (!memory.ok()) return memory;
    if (auto s = Check("cudaMemsetAsync",
                       cudaMemsetAsync((*memory)->data(), 0, static_cast<std::size_t>(bytes), stream_));
        !s.ok()) {
      return s;
    }
    if (auto s = Synchronize(); !s.ok()) return s;
    return memory;
  }

  absl::StatusOr<std::unique_ptr<Memory>> OpenIpc(const std::string& handle, std::int64_t offset,
                                                  std::int64_t bytes) override {
    return ipc_handles_.Open(handle, offset, bytes);
  }

  bool pins_host_memory() const override { return true; }

  void PinHost(char* data, std::int64_t bytes) override {
    if (stream_ != nullptr) client_buffers_.Pin(data, bytes);
  }

  void UnpinHost(char* data) override {
    if (!client_buffers_.IsPinned(data)) return;
    static_cast<void>(Synchronize());  // a call that failed may have left work on it
    client_buffers_.Unpin(data);
  }

  absl::Status Apply(const CacheView& view, const Step& step, RowsIn rows_in) override {
    return std::visit([&](const auto& s) { return ApplyStep(view, step, s.in, s.rows, rows_in); }, step);
  }

  absl::Status CopyOut(const Memory& memory, std::span<const Piece> pieces, char* host) override {
    Granules granules(pieces);
    std::optional<Chunk> before;  // on its way while the next one is gathered
    const auto drain = [&host](Chunk& chunk) {
      if (auto s = chunk.half.Await(); !s.ok()) return s;
      std::memcpy(host, chunk.data, static_cast<std::size_t>(chunk.bytes));
      host += chunk.bytes;
      return absl::OkStatus();
    };
    while (granules.left() > 0) {
      auto chunk = NextChunk(memory, granules);
      if (!chunk.ok()) return chunk.status();
      const int queued =
          CudaPages()->Gather(chunk->set, chunk->numbers, chunk->count, chunk->data, {.stream = stream_});
      if (auto s = Check("gather", static_cast<cudaError_t>(queued)); !s.ok()) return s;
      if (auto s = chunk->half.Queued(); !s.ok()) return s;
      if (before) {
        if (auto s = drain(*before); !s.ok()) return s;
      }
      before = *std::move(chunk);
    }
    return before ? drain(*before) : absl::OkStatus();
  }

  absl::Status CopyIn(Memory& memory, std::span<const Piece> pieces, const char* host) override {
    Granules granules(pieces);
    while (granules.left() > 0) {
      auto chunk = NextChunk(memory, granules);
      if (!chunk.ok()) return chunk.status();
      std::memcpy(chunk->data, host, static_cast<std::size_t>(chunk->bytes));
      host += chunk->bytes;
      const int queued =
          CudaPages()->Scatter(chunk->data, chunk->set, chunk->numbers, chunk->count, {.stream = stream_});
      if (auto s = Check("scatter", static_cast<cudaError_t>(queued)); !s.ok()) return s;
    }
    return Synchronize();
  }

  std::int64_t page_alignment() const override { return kCudaMoveAlignment; }

  absl::StatusOr<std::shared_ptr<void>> MapHost(void* data, std::int64_t bytes) override {
    return MapCudaHost(id_, data, bytes);
  }

  bool Reaches(const Device& other) override {
    const auto* peer = dynamic_cast<const CudaDevice*>(&other);
    return peer == this || (peer != nullptr && EnableCudaPeer(id_, peer->id_));
  }

  absl::StatusOr<std::chrono::nanoseconds> MovePages(const PageSet& from,
                                                     std::span<const std::int64_t> from_blocks,
                                                     const PageSet& to,
                                                     std::span<const std::int64_t> to_blocks) override {
    auto moved = pages_.Move(stream_, from, from_blocks, to, to_blocks);
    if (const cudaError_t error = pages_.error(); error != cudaSuccess) return Check("MovePages", error);
    return moved;
  }

 protected:
  absl::Status DoOpen() override {
    const auto before = NvmlUsedBytes(uuid_);
    if (auto s = Check("cudaSetDevice", cudaSetDevice(id_.ordinal)); !s.ok()) return s;
    if (auto s = Check("cudaStreamCreate", cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
        !s.ok()) {
      return s;
    }
    if (auto s = TakeMemory(); !s.ok()) return s;
    if (share_of_free_) {
      std::size_t free = 0;
      std::size_t total = 0;
      if (auto s = Check("cudaMemGetInfo", cudaMemGetInfo(&free, &total)); !s.ok()) return s;
      budget().set_limit_bytes(static_cast<std::int64_t>(kDefaultBudgetShare * static_cast<double>(free)));
    }
    if (auto s = CompareExpf(); !s.ok()) return s;
    if (auto s = LoadKernels(); !s.ok()) return s;
    const auto after = NvmlUsedBytes(uuid_);
    if (before && after) overhead_bytes_ = std::max<std::int64_t>(*after - *before, 0);
    return absl::OkStatus();
  }

 private:
  // A half of the staging memory that holds granules: their view, their numbers and their bytes.
  struct Chunk {
    Staging::Half half;
    PageSet set;
    const std::int64_t* numbers;
    std::int64_t count;
    char* data;
    std::int64_t bytes;
  };

  // Device memory of one step beyond the stage.
  struct TransientStage {
    TransientStage() = default;
    TransientStage(const TransientStage&) = delete;
    TransientStage& operator=(const TransientStage&) = delete;
    ~TransientStage() { cudaFree(data); }  // waits for what uses it
    Budget::Reservation reservation;
    char* data = nullptr;
  };

  static MemoryKind OrDefault(MemoryKind kind) {
    return kind == MemoryKind::kDefault ? MemoryKind::kCudaVmm : kind;
  }

  absl::Status Check(const char* call, cudaError_t error) {
    if (error == cudaSuccess) return absl::OkStatus();
    return Broken(absl::StrFormat("%s: %s", call, cudaGetErrorString(error)));
  }
  absl::Status Synchronize() { return Check("cudaStreamSynchronize", cudaStreamSynchronize(stream_)); }
  absl::Status Copy(void* to, const void* from, std::int64_t bytes, cudaMemcpyKind kind) {
    return Check("cudaMemcpyAsync",
                 cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), kind, stream_));
  }

  absl::Status Set(int half) override {
    return Check("cudaEventRecord", cudaEventRecord(fences_[half], stream_));
  }
  absl::Status Await(int half) override {
    return Check("cudaEventSynchronize", cudaEventSynchronize(fences_[half]));
  }

  absl::Status TakeMemory() {
    for (cudaEvent_t& fence : fences_) {
      if (auto s = Check("cudaEventCreate", cudaEventCreateWithFlags(&fence, cudaEventDisableTiming));
          !s.ok())
        return s;
    }
    void* data = nullptr;
    if (auto s = Check("cudaHostAlloc", cudaHostAlloc(&data, 2 * kHalfBytes, cudaHostAllocDefault)); !s.ok())
      return s;
    pinned_ = static_cast<char*>(data);
    pinned_bytes_ += 2 * kHalfBytes;
    staging_.emplace(pinned_, kHalfBytes, static_cast<Staging::Fences&>(*this));
    if (auto s = Check("cudaMalloc", cudaMalloc(&data, kStageBytes)); !s.ok()) return s;
    stage_ = static_cast<char*>(data);
    return absl::OkStatus();
  }

  // The next granules of `granules`, as many as fit.
  absl::StatusOr<Chunk> NextChunk(const Memory& memory, Granules& granules) {
    auto half = staging_->Next();
    if (!half.ok()) return half.status();
    const auto number_bytes = static_cast<std::int64_t>(sizeof(std::int64_t));
    const std::int64_t view_bytes = Aligned(sizeof(PageView));
    const std::int64_t fit = (kHalfBytes - view_bytes - 256) / (granules.bytes() + number_bytes);
    const std::int64_t count = std::min(granules.left(), fit);
    auto* view = reinterpret_cast<PageView*>(half->data());
    auto* numbers = reinterpret_cast<std::int64_t*>(half->data() + view_bytes);
    char* data = half->data() + view_bytes + Aligned(count * number_bytes);
    const PageSet set = granules.Set(memory.data(), memory.bytes(), *view, view);
    granules.Next(count, numbers);
    return Chunk{*std::move(half), set, numbers, count, data, count * granules.bytes()};
  }

  // The kernels' exp is the chip's; summaries are defined by the model of kernels/exp.h.
  absl::Status CompareExpf() {
    auto* device_values = reinterpret_cast<float*>(stage_);
    const int launched = LaunchExpfProbe(device_values, kProbeArguments, stream_);
    if (auto s = Check("expf probe", static_cast<cudaError_t>(launched)); !s.ok()) return s;
    std::vector<float> values(kProbeArguments);
    if (auto s = Copy(values.data(), device_values,
                      kProbeArguments * static_cast<std::int64_t>(sizeof(float)), cudaMemcpyDeviceToHost);
        !s.ok()) {
      return s;
    }
    if (auto s = Synchronize(); !s.ok()) return s;
    for (std::int64_t i = 0; i < kProbeArguments; ++i) {
      const float argument = std::bit_cast<float>(ProbeArgument(i, kProbeArguments));
      const float want = Exp(argument);
      if (std::bit_cast<std::uint32_t>(values[i]) != std::bit_cast<std::uint32_t>(want)) {
        return Refuse(Reason::EXPF_MISMATCH, "device",
                      absl::StrFormat("%s (%s): expf(%a) is %a, not %a: its summaries would differ", name(),
                                      description_, argument, values[i], want));
      }
    }
    return absl::OkStatus();
  }

  // Runs every kernel once, on a row of padding: the driver loads a kernel at its first launch, which takes
  // time and memory.
  absl::Status LoadKernels() {
    const CacheGeometry g{.layers = 1,
                          .blocks = 2,
                          .block_size = kRegionTokens,
                          .block_stride = kSummaryBytes,
                          .ring_blocks = 2,
                          .capacity = kRegionTokens,
                          .rows_per_layer = kRegionTokens};
    const CacheView view = MakeView(g, stage_, {0, 1});
    const std::vector<std::uint16_t> row(kRowElements);
    const RowsView in = PackedRows(row.data(), 1);
    const std::int64_t padding = -1;
    const std::int32_t starts[] = {0, 1};
    const std::int32_t seq_len = 1;
    const Step steps[] = {DecodeStep{1, in, &padding, &padding, &padding},
                          VerifyStep{1, 1, in, &padding, starts, &seq_len, &padding},
                          PrefillStep{1, 1, in, &padding, &padding, starts, &padding}};
    for (const Step& step : steps) {
      if (auto s = Apply(view, step, RowsIn::kHost); !s.ok()) return s;
    }
    auto half = staging_->Next();
    if (!half.ok()) return half.status();
    auto* page = new (half->data()) PageView{.offset = 0, .block_stride = 16, .bytes = 16};
    auto* block = new (half->data() + sizeof(PageView)) std::int64_t{padding};
    const int queued = CudaPages()->Gather({reinterpret_cast<std::uint8_t*>(stage_), 1, page, 1, 16}, block,
                                           1, stage_, {.stream = stream_});
    if (auto s = Check("gather", static_cast<cudaError_t>(queued)); !s.ok()) return s;
    return half->Await();
  }

  absl::Status Launch(const CacheView& view, const Step& step) {
    struct Run {
      const UpdateKernels& kernels;
      const CacheView& view;
      const kvsummary::Launch launch;
      int operator()(const DecodeStep& s) const { return kernels.Decode(view, s, launch); }
      int operator()(const VerifyStep& s) const { return kernels.Verify(view, s, launch); }
      int operator()(const PrefillStep& s) const { return kernels.Prefill(view, s, launch); }
    };
    return Check("launch",
                 static_cast<cudaError_t>(std::visit(Run{kernels_, view, {.stream = stream_}}, step)));
  }

  absl::Status ApplyStep(const CacheView& view, const Step& step, const RowsView& in, std::int64_t rows,
                         RowsIn rows_in) {
    if (rows == 0) return absl::OkStatus();
    const bool pinned = rows_in == RowsIn::kHost && client_buffers_.Hold(in, view.layers, rows);
    const PackedStep packed(step, view.layers, rows_in == RowsIn::kHost && !pinned);
    const std::int64_t pinned_bytes = pinned ? view.layers * rows * kRowBytes : 0;
    if (packed.bytes() + pinned_bytes <= kInPlaceBytes && (!pinned || AlignedForKernels(in)))
      return ApplyInPlace(view, packed);
    return ApplyStaged(view, packed, in, pinned ? rows : 0);
  }

  absl::Status ApplyInPlace(const CacheView& view, const PackedStep& packed) {
    auto half = staging_->Next();
    if (!half.ok()) return half.status();
    packed.Write(0, packed.bytes(), half->data());
    if (auto s = Launch(view, packed.At(half->data())); !s.ok()) return s;
    return half->Await();
  }

  // `pinned_rows`: as many rows, of each layer, lie in pinned memory, and are copied from there.
  absl::Status ApplyStaged(const CacheView& view, const PackedStep& packed, const RowsView& in,
                           std::int64_t pinned_rows) {
    TransientStage transient;
    const std::int64_t bytes = packed.bytes() + view.layers * pinned_rows * kRowBytes;
    if (auto s = Grow(bytes, transient); !s.ok()) return s;
    char* stage = transient.data != nullptr ? transient.data : stage_;
    std::optional<Staging::Half> half;
    for (std::int64_t begin = 0; begin < packed.bytes(); begin += kHalfBytes) {
      half.reset();  // fenced: the copy of the part before
      auto next = staging_->Next();
      if (!next.ok()) return next.status();
      half = *std::move(next);
      const std::int64_t end = std::min(begin + kHalfBytes, packed.bytes());
      packed.Write(begin, end, half->data());
      if (auto s = Copy(stage + begin, half->data(), end - begin, cudaMemcpyHostToDevice); !s.ok()) return s;
    }
    Step step = packed.At(stage);
    if (pinned_rows > 0) {
      char* to = stage + packed.bytes();
      const cudaError_t queued = CopyPinnedRows(to, in, view.layers, pinned_rows, stream_);
      if (auto s = Check("cudaMemcpy2DAsync", queued); !s.ok()) return s;
      std::visit([&](auto& s) { s.in = PackedRows(to, pinned_rows); }, step);
    }
    if (auto s = Launch(view, step); !s.ok()) return s;
    return half->Await();
  }

  // Takes memory for a step that the stage does not hold.
  absl::Status Grow(std::int64_t bytes, TransientStage& stage) {
    if (bytes <= kStageBytes) return absl::OkStatus();
    const auto none = [&](const std::string& why) {
      return Refuse(Reason::OUT_OF_MEMORY, "rows",
                    absl::StrFormat("%s has no %d bytes to stage the rows: %s", name(), bytes, why));
    };
    auto reservation = budget().Reserve(bytes);
    if (!reservation.ok()) return none(std::string(reservation.status().message()));
    void* data = nullptr;
    if (const cudaError_t error = cudaMalloc(&data, static_cast<std::size_t>(bytes)); error != cudaSuccess) {
      cudaGetLastError();
      return error == cudaErrorMemoryAllocation ? none("out of memory") : Check("cudaMalloc", error);
    }
    stage.reservation = *std::move(reservation);
    stage.data = static_cast<char*>(data);
    return absl::OkStatus();
  }

  const CudaDeviceId id_;
  const bool share_of_free_;
  const std::string description_;
  const std::string uuid_;
  const UpdateKernels& kernels_ = *CudaKernels();
  CudaIpcHandles ipc_handles_;
  std::atomic<std::int64_t> overhead_bytes_ = 0;
  std::atomic<std::int64_t> pinned_bytes_ = 0;  // of the staging memory
  cudaStream_t stream_ = nullptr;
  cudaEvent_t fences_[2] = {};
  char* pinned_ = nullptr;
  std::optional<Staging> staging_;
  CudaPageStage pages_;
  char* stage_ = nullptr;
  CudaPinnedBuffers client_buffers_;
};

}  // namespace

std::vector<std::unique_ptr<Device>> MakeCudaDevices(std::int64_t budget_bytes) {
  std::vector<std::unique_ptr<Device>> devices;
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess)
    return devices;  // no driver, or none that this build can use
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties;
    if (cudaGetDeviceProperties(&properties, i) != cudaSuccess) continue;
    devices.push_back(std::make_unique<CudaDevice>(i, properties, budget_bytes));
  }
  return devices;
}

}  // namespace kvsummary
