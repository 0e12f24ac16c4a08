#include <cstring>

#include "server/device/device.h"

namespace kvsummary {
namespace {

class HostDevice final : public Device {
 public:
  HostDevice(const UpdateKernels& kernels, std::int64_t budget_bytes)
      : Device("host", budget_bytes), kernels_(kernels) {}

  std::string description() const override { return kernels_.name(); }

  absl::StatusOr<std::unique_ptr<Memory>> Allocate(std::int64_t bytes, MemoryKind /*kind*/) override {
    return AllocateHostMemory(bytes);
  }
  absl::StatusOr<std::unique_ptr<Memory>> AllocateStaging(std::int64_t bytes, MemoryKind /*kind*/) override {
    return AllocateStagingMemory(bytes);
  }

  absl::Status Apply(const CacheView& view, const Step& step, RowsIn /*rows_in*/) override {
    struct Run {
      const UpdateKernels& kernels;
      const CacheView& view;
      void operator()(const DecodeStep& s) const { kernels.Decode(view, s, {}); }
      void operator()(const VerifyStep& s) const { kernels.Verify(view, s, {}); }
      void operator()(const PrefillStep& s) const { kernels.Prefill(view, s, {}); }
    };
    std::visit(Run{kernels_, view}, step);  // the host's kernels cannot fail
    return absl::OkStatus();
  }

  absl::Status CopyOut(const Memory& memory, std::span<const Piece> pieces, char* host) override {
    const char* base = static_cast<const char*>(memory.data());
    for (const Piece& piece : pieces) {
      std::memcpy(host, base + piece.offset, static_cast<std::size_t>(piece.bytes));
      host += piece.bytes;
    }
    return absl::OkStatus();
  }

  absl::Status CopyIn(Memory& memory, std::span<const Piece> pieces, const char* host) override {
    char* base = static_cast<char*>(memory.data());
    for (const Piece& piece : pieces) {
      std::memcpy(base + piece.offset, host, static_cast<std::size_t>(piece.bytes));
      host += piece.bytes;
    }
    return absl::OkStatus();
  }

 protected:
  absl::Status DoOpen() override { return absl::OkStatus(); }

 private:
  const UpdateKernels& kernels_;
};

}  // namespace

std::unique_ptr<Device> MakeHostDevice(const UpdateKernels& kernels, std::int64_t budget_bytes) {
  return std::make_unique<HostDevice>(kernels, budget_bytes);
}

}  // namespace kvsummary
