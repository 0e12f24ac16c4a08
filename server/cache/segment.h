// A cache's memory, and the part of its device's budget that it takes.
#pragma once

#include <memory>
#include <utility>

#include "server/device/device.h"

namespace kvsummary {

// Shared by a cache's successive lives and by the records of who has mapped it: the memory is free, and the
// budget has it back, once none of them is left.
class Segment {
 public:
  // Freed on the device's executor, behind the work that is queued there, whoever lets go last.
  static std::shared_ptr<Segment> Make(Device& device, Budget::Reservation reservation,
                                       std::unique_ptr<Memory> memory) {
    return {new Segment(std::move(reservation), std::move(memory)), [&device](Segment* segment) {
              device.executor().SubmitFree([owned = std::unique_ptr<Segment>(segment)] {});
            }};
  }

  Memory& memory() const { return *memory_; }

 private:
  Segment(Budget::Reservation reservation, std::unique_ptr<Memory> memory)
      : reservation_(std::move(reservation)), memory_(std::move(memory)) {}

  const Budget::Reservation reservation_;  // outlives memory_
  const std::unique_ptr<Memory> memory_;
};

}  // namespace kvsummary
