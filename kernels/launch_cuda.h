// The launchers behind CudaKernels(), one a .cu file. Each queues one launch on the stream and returns
// the launch's cudaError_t; a step without rows launches nothing.
#pragma once

#include "kernels/update.h"

namespace kvsummary::cuda {

int LaunchDecode(const CacheView& view, const DecodeStep& step, const Launch& launch);
int LaunchVerify(const CacheView& view, const VerifyStep& step, const Launch& launch);
int LaunchPrefill(const CacheView& view, const PrefillStep& step, const Launch& launch);

}  // namespace kvsummary::cuda
