// The CUDA kernels behind C functions, for bench_kernels.py: it drives them and the engine's own kernels on
// the same tensors. The structures are those of kernels/layout.h and kernels/update.h.
#include "kernels/update.h"

using namespace kvsummary;

extern "C" {

int kvs_decode(const CacheView* view, const DecodeStep* step, void* stream) {
  return CudaKernels()->Decode(*view, *step, {stream, nullptr});
}
int kvs_verify(const CacheView* view, const VerifyStep* step, void* stream) {
  return CudaKernels()->Verify(*view, *step, {stream, nullptr});
}
int kvs_prefill(const CacheView* view, const PrefillStep* step, void* stream) {
  return CudaKernels()->Prefill(*view, *step, {stream, nullptr});
}
// Sizes of CacheView, RowsView, DecodeStep, VerifyStep and PrefillStep: the driver checks its mirrors.
void kvs_sizes(int* sizes) {
  sizes[0] = sizeof(CacheView);
  sizes[1] = sizeof(RowsView);
  sizes[2] = sizeof(DecodeStep);
  sizes[3] = sizeof(VerifyStep);
  sizes[4] = sizeof(PrefillStep);
}

}  // extern "C"
