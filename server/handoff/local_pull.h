// Brings an offer of this daemon's own into one of its caches: in one movement a part where the cache's
// device can address the staging memory, else through host memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

#include "server/handoff/acceptance.h"
#include "server/handoff/offers.h"

namespace kvsummary {

class LocalPull : public std::enable_shared_from_this<LocalPull> {
 public:
  // Feeds the acceptance for as long as the answer lives.
  static std::shared_ptr<LocalPull> Start(std::shared_ptr<Offer> offer,
                                          std::shared_ptr<Acceptance> acceptance);
  // Not from a listener of the offer's.
  ~LocalPull();

 private:
  LocalPull(std::shared_ptr<Offer> offer, std::shared_ptr<Acceptance> acceptance)
      : offer_(std::move(offer)), acceptance_(std::move(acceptance)) {}
  void PumpSoon();
  // (executor of the cache's device)
  void Pump();
  void Bring(const std::shared_ptr<const StagedPart>& staged);
  // (executor of the staging memory's device) Reads chunks one by one.
  static void Read(const std::shared_ptr<Acceptance>& acceptance,
                   const std::shared_ptr<const StagedPart>& staged, std::int64_t chunk);

  const std::shared_ptr<Offer> offer_;
  const std::shared_ptr<Acceptance> acceptance_;
  bool begun_ = false;    // the executor's, as next_
  std::size_t next_ = 0;  // part
};

}  // namespace kvsummary
