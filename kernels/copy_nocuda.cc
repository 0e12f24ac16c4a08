// CudaPages() of a build without CUDA.
#include "kernels/copy.h"

namespace kvsummary {

const PageMover* CudaPages() { return nullptr; }

}  // namespace kvsummary
