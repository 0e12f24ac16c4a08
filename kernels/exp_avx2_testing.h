// The vector forms of the exponential for tests. Only their own file is compiled for AVX2, so a test starts,
// and can skip, where there is none.
#pragma once

#include <cstdint>

namespace kvsummary::avx2 {

inline constexpr int kVector = 16;

// Exp16 of the sixteen floats with bits from `first` on, in each of its forms; ScaledExp takes the scale out.
void AllExp(std::uint32_t first, float* out);
void NormalExp(std::uint32_t first, float* out);
void ScaledExp(std::uint32_t first, float* out);

// Ex2Square16 of `x` in every lane: one of them.
std::uint32_t Square(std::uint32_t x);

}  // namespace kvsummary::avx2
