// CudaKernels() of a build without CUDA.
#include "kernels/update.h"

namespace kvsummary {

const UpdateKernels* CudaKernels() { return nullptr; }

}  // namespace kvsummary
