// The CUDA implementation of the updates: a thin table over the launchers of decode, verify and prefill.
#include "kernels/launch_cuda.h"
#include "kernels/update.h"

namespace kvsummary {
namespace {

class Cuda final : public UpdateKernels {
 public:
  const char* name() const override { return "cuda"; }
  int Decode(const CacheView& view, const DecodeStep& step, const Launch& launch) const override {
    return cuda::LaunchDecode(view, step, launch);
  }
  int Verify(const CacheView& view, const VerifyStep& step, const Launch& launch) const override {
    return cuda::LaunchVerify(view, step, launch);
  }
  int Prefill(const CacheView& view, const PrefillStep& step, const Launch& launch) const override {
    return cuda::LaunchPrefill(view, step, launch);
  }
};

}  // namespace

const UpdateKernels* CudaKernels() {
  static const Cuda kernels;
  return &kernels;
}

}  // namespace kvsummary
