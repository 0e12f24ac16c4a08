// Caches and their geometry as messages.
#pragma once

#include "kernels/layout.h"
#include "kvsummary/v1/cache.pb.h"
#include "server/cache/cache.h"

namespace kvsummary {

CacheGeometry FromProto(const v1::CacheGeometry& g);

void FillInfo(const Cache& cache, v1::CacheInfo* out);

}  // namespace kvsummary
