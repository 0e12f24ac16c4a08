// The region's arithmetic in AVX2 and FMA. Call it only on a CPU that has both.
#pragma once

#include "kernels/summary_math.h"

namespace kvsummary {

// The bytes of CloseRegionScalar.
void CloseRegionAvx2(const RegionRows& rows, std::uint8_t* summary);

}  // namespace kvsummary
