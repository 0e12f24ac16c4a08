// A CUDA device through the runtime API. One stream; every call waits for it, so that host memory given to
// a call may go when the call returns.
#include <cuda_runtime_api.h>

#include <bit>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/cuda_probe.h"
#include "kernels/exp.h"
#include "server/device/cuda_memory.h"
#include "server/device/device.h"
#include "server/error.h"

namespace kvsummary {
namespace {

constexpr double kDefaultBudgetShare = 0.8;
constexpr std::int64_t kProbeArguments = 1 << 20;

// Stages are cut at this boundary: what the kernels' 16-byte loads need, and more.
constexpr std::int64_t kStageAlignment = 256;

std::int64_t Aligned(std::int64_t bytes) {
  return (bytes + kStageAlignment - 1) / kStageAlignment * kStageAlignment;
}

std::string Uuid(const cudaUUID_t& uuid) {
  std::string text = "GPU-";
  for (int i = 0; i < 16; ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    absl::StrAppendFormat(&text, "%02x", static_cast<unsigned char>(uuid.bytes[i]));
  }
  return text;
}

class CudaDevice final : public Device {
 public:
  CudaDevice(int ordinal, const cudaDeviceProp& properties, std::int64_t budget_bytes)
      : Device(absl::StrCat("cuda:", ordinal), budget_bytes),
        id_{name(), ordinal, std::strstr(properties.name, " MIG ") != nullptr},
        share_of_free_(budget_bytes == 0),
        description_(absl::StrFormat("%s, sm_%d%d", properties.name, properties.major, properties.minor)),
        uuid_(Uuid(properties.uuid)) {}

  ~CudaDevice() override {
    // Not on the executor's thread: without this, freeing would make a context on device 0.
    if (stream_ != nullptr) cudaSetDevice(id_.ordinal);
    if (stage_ != nullptr) cudaFree(stage_);
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }

  std::string description() const override { return description_; }
  std::string uuid() const override { return uuid_; }

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
    return OpenCudaIpc(id_, handle, offset, bytes);
  }

  absl::Status Apply(const CacheView& view, const Step& step, RowsIn rows_in) override {
    return std::visit([&](const auto& s) { return ApplyStep(view, s, rows_in); }, step);
  }

  absl::Status CopyOut(const Memory& memory, std::span<const Piece> pieces, char* host) override {
    const char* base = static_cast<const char*>(memory.data());
    for (const Piece& piece : pieces) {
      if (auto s = Copy(host, base + piece.offset, piece.bytes, cudaMemcpyDeviceToHost); !s.ok()) return s;
      host += piece.bytes;
    }
    return Synchronize();
  }

  absl::Status CopyIn(Memory& memory, std::span<const Piece> pieces, const char* host) override {
    char* base = static_cast<char*>(memory.data());
    for (const Piece& piece : pieces) {
      if (auto s = Copy(base + piece.offset, host, piece.bytes, cudaMemcpyHostToDevice); !s.ok()) return s;
      host += piece.bytes;
    }
    return Synchronize();
  }

 protected:
  absl::Status DoOpen() override {
    if (auto s = Check("cudaSetDevice", cudaSetDevice(id_.ordinal)); !s.ok()) return s;
    if (auto s = Check("cudaStreamCreate", cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
        !s.ok()) {
      return s;
    }
    if (share_of_free_) {
      std::size_t free = 0;
      std::size_t total = 0;
      if (auto s = Check("cudaMemGetInfo", cudaMemGetInfo(&free, &total)); !s.ok()) return s;
      budget().set_limit_bytes(static_cast<std::int64_t>(kDefaultBudgetShare * static_cast<double>(free)));
    }
    return CompareExpf();
  }

 private:
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

  absl::Status Copy2D(char* to, const std::uint16_t* from, std::int64_t stride, std::int64_t width,
                      std::int64_t height) {
    return Check("cudaMemcpy2DAsync",
                 cudaMemcpy2DAsync(to, kRowBytes, from, static_cast<std::size_t>(stride) * sizeof(*from),
                                   static_cast<std::size_t>(width), static_cast<std::size_t>(height),
                                   cudaMemcpyHostToDevice, stream_));
  }
  // Queues the copies that make packed rows at `to` of rows in host memory.
  absl::Status CopyRows(char* to, const RowsView& in, std::int64_t layers, std::int64_t rows) {
    if (in.key_layer_stride == rows * in.key_stride && in.z_layer_stride == rows * in.z_stride) {
      rows *= layers;
      layers = 1;
    }
    const bool whole = in.z == in.key + kChannels && in.key_stride == in.z_stride &&
                       in.key_layer_stride == in.z_layer_stride && in.key_stride >= kRowElements;
    for (std::int64_t layer = 0; layer < layers; ++layer, to += rows * kRowBytes) {
      const std::uint16_t* key = in.key + layer * in.key_layer_stride;
      const std::uint16_t* z = in.z + layer * in.z_layer_stride;
      absl::Status s;
      if (whole && in.key_stride == kRowElements) {
        s = Copy(to, key, rows * kRowBytes, cudaMemcpyHostToDevice);
      } else if (whole) {
        s = Copy2D(to, key, in.key_stride, kRowBytes, rows);
      } else {
        s = Copy2D(to, key, in.key_stride, kRowBytes / 2, rows);
        if (s.ok()) s = Copy2D(to + kRowBytes / 2, z, in.z_stride, kRowBytes / 2, rows);
      }
      if (!s.ok()) return s;
    }
    return absl::OkStatus();
  }

  // The kernels' exp is the chip's; summaries are defined by the model of kernels/exp.h.
  absl::Status CompareExpf() {
    if (auto s = GrowStage(kProbeArguments * static_cast<std::int64_t>(sizeof(float))); !s.ok()) return s;
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

  absl::Status GrowStage(std::int64_t bytes) {
    if (bytes <= stage_bytes_) return absl::OkStatus();
    if (stage_ != nullptr) cudaFree(stage_);
    stage_ = nullptr;
    stage_bytes_ = 0;
    void* data = nullptr;
    if (const cudaError_t error = cudaMalloc(&data, static_cast<std::size_t>(bytes)); error != cudaSuccess) {
      cudaGetLastError();
      if (error != cudaErrorMemoryAllocation) return Check("cudaMalloc", error);
      return Refuse(Reason::OUT_OF_MEMORY, "rows",
                    absl::StrFormat("%s has no %d bytes to stage the rows", name(), bytes));
    }
    stage_ = static_cast<char*>(data);
    stage_bytes_ = bytes;
    return absl::OkStatus();
  }

  // Where arrays go, one after the other, in the stage.
  class StageCursor {
   public:
    template <typename T>
    void Add(const T*& pointer, std::int64_t count) {
      Add(reinterpret_cast<const void**>(&pointer), count * static_cast<std::int64_t>(sizeof(T)));
    }
    void AddRows(RowsView& in, std::int64_t layers, std::int64_t rows) {
      rows_ = &in;
      layers_ = layers;
      row_count_ = rows;
      rows_offset_ = bytes_;
      bytes_ += Aligned(layers * rows * kRowBytes);
    }
    std::int64_t bytes() const { return bytes_; }

    // Queues the copies to `stage` and points the step's arrays there.
    absl::Status Move(CudaDevice& device, char* stage) {
      for (int i = 0; i < count_; ++i) {
        const Array& a = arrays_[i];
        if (auto s = device.Copy(stage + a.offset, *a.pointer, a.bytes, cudaMemcpyHostToDevice); !s.ok())
          return s;
        *a.pointer = stage + a.offset;
      }
      if (rows_ == nullptr) return absl::OkStatus();
      char* rows = stage + rows_offset_;
      if (auto s = device.CopyRows(rows, *rows_, layers_, row_count_); !s.ok()) return s;
      *rows_ = PackedRows(rows, row_count_);
      return absl::OkStatus();
    }

   private:
    struct Array {
      const void** pointer;
      std::int64_t offset;
      std::int64_t bytes;
    };
    void Add(const void** pointer, std::int64_t bytes) {
      arrays_[count_++] = {pointer, bytes_, bytes};
      bytes_ += Aligned(bytes);
    }
    Array arrays_[4];
    int count_ = 0;
    std::int64_t bytes_ = 0;
    RowsView* rows_ = nullptr;  // null: they stay where they are
    std::int64_t layers_ = 0;
    std::int64_t row_count_ = 0;
    std::int64_t rows_offset_ = 0;
  };

  static void StageArrays(StageCursor& stage, DecodeStep& s) {
    stage.Add(s.slots, s.rows);
    stage.Add(s.positions, s.rows);
    stage.Add(s.ring_bases, s.rows);
  }
  static void StageArrays(StageCursor& stage, VerifyStep& s) {
    stage.Add(s.slots, s.rows);
    stage.Add(s.query_start_loc, s.requests + 1);
    stage.Add(s.seq_lens, s.requests);
    stage.Add(s.ring_bases, s.rows);
  }
  static void StageArrays(StageCursor& stage, PrefillStep& s) {
    stage.Add(s.slots, s.rows);
    stage.Add(s.positions, s.rows);
    stage.Add(s.query_start_loc, s.requests + 1);
    stage.Add(s.ring_bases, s.rows);
  }
  int Launch(const CacheView& v, const DecodeStep& s) { return kernels_.Decode(v, s, {.stream = stream_}); }
  int Launch(const CacheView& v, const VerifyStep& s) { return kernels_.Verify(v, s, {.stream = stream_}); }
  int Launch(const CacheView& v, const PrefillStep& s) { return kernels_.Prefill(v, s, {.stream = stream_}); }

  template <typename S>
  absl::Status ApplyStep(const CacheView& view, S step, RowsIn rows_in) {
    if (step.rows == 0) return absl::OkStatus();
    StageCursor cursor;
    StageArrays(cursor, step);
    if (rows_in == RowsIn::kHost) cursor.AddRows(step.in, view.layers, step.rows);
    if (auto s = GrowStage(cursor.bytes()); !s.ok()) return s;
    if (auto s = cursor.Move(*this, stage_); !s.ok()) return s;
    if (auto s = Check("launch", static_cast<cudaError_t>(Launch(view, step))); !s.ok()) return s;
    return Synchronize();
  }

  const CudaDeviceId id_;
  const bool share_of_free_;
  const std::string description_;
  const std::string uuid_;
  const UpdateKernels& kernels_ = *CudaKernels();
  cudaStream_t stream_ = nullptr;
  char* stage_ = nullptr;
  std::int64_t stage_bytes_ = 0;
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
