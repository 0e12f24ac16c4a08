// One offer as those who pull it see it: parts in staging memory, more of which may come, and its end. It
// outlives its entry among the daemon's offers (offers.h) for as long as somebody holds it.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/handoff/arena.h"
#include "server/handoff/plan.h"
#include "server/store/types.h"

namespace kvsummary {

// Bytes of an offer, immutable. Keeps them.
struct StagedPart {
  std::int32_t number = 0;
  Part part;
  Arena::Extent extent;
  // Where they lie, addressable by the arena's device.
  char* data() const { return static_cast<char*>(extent.arena()->memory()->data()) + extent.offset(); }
};

// (executor of the arena's device) A chunk's bytes.
absl::Status ReadChunk(const StagedPart& staged, const Chunk& chunk, std::string& bytes);

// Thread-safe.
class Offer {
 public:
  // Parts from one on, and how it stands.
  struct View {
    std::vector<std::shared_ptr<const StagedPart>> parts;
    bool complete = false;              // no more parts will come
    std::int64_t committed_tokens = 0;  // when complete
    absl::Status ended;                 // not OK: why it has ended; nobody waits for more
  };

  // `device` is where its parts lie.
  Offer(Device& device, std::int32_t layers, std::int32_t block_size, std::vector<GroupSpec> groups)
      : device_(device), layers_(layers), block_size_(block_size), groups_(std::move(groups)) {}

  // Puts parts behind those that there are. Not OK when the offer has ended: why. Answers all its bytes.
  absl::StatusOr<std::int64_t> Add(const std::vector<std::shared_ptr<const StagedPart>>& parts, bool complete,
                                   std::int64_t committed_tokens);
  // Lets go of the parts; the first reason stays.
  void End(const absl::Status& why);

  Device& device() const { return device_; }
  std::int32_t layers() const { return layers_; }
  std::int32_t block_size() const { return block_size_; }
  // Of the namespace whose groups it may have blocks of; none without one.
  const std::vector<GroupSpec>& groups() const { return groups_; }
  View Look(std::size_t from) const;
  // Calls `listener` after every change, on the thread that makes it; it must not call Listen or Forget. Not
  // any more when Forget has returned.
  using Key = std::pair<const void*, std::uint32_t>;  // whoever listens, and his number for it
  void Listen(Key key, std::function<void()> listener);
  void Forget(Key key);

 private:
  void Tell();

  Device& device_;
  const std::int32_t layers_;
  const std::int32_t block_size_;
  const std::vector<GroupSpec> groups_;
  mutable std::mutex mutex_;  // of what View has
  std::vector<std::shared_ptr<const StagedPart>> parts_;
  bool complete_ = false;
  std::int64_t committed_tokens_ = 0;
  absl::Status ended_;
  std::mutex listeners_mutex_;
  std::map<Key, std::function<void()>> listeners_;
};

}  // namespace kvsummary
