// The summary of a region, computed a second time: plain scalar code written from the definition, which
// shares nothing with kernels/ but the exponential's table. What the daemon stored is compared with it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/layout.h"

namespace kvsummary {

inline constexpr std::size_t kRegionElements = std::size_t{kRegionTokens} * kRowElements;

// `rows`: the region's eight rows of kRowElements bf16 values each, in position order.
std::array<std::uint8_t, kSummaryBytes> ReferenceSummary(
    std::span<const std::uint16_t, kRegionElements> rows);

// e4m3fn of a bf16 value: to nearest even, beyond the range +-448, NaN of either sign 0x7F.
std::uint8_t ReferenceE4m3(std::uint16_t bf16);

}  // namespace kvsummary
