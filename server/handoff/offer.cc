#include "server/handoff/offer.h"

#include <utility>

namespace kvsummary {

absl::Status ReadChunk(const StagedPart& staged, const Chunk& chunk, std::string& bytes) {
  const Arena& arena = *staged.extent.arena();
  const Piece piece{staged.extent.offset() + chunk.offset(staged.part), chunk.bytes()};
  bytes.resize(static_cast<std::size_t>(piece.bytes));
  return arena.device().CopyOut(*arena.memory(), {&piece, 1}, bytes.data());
}

Offer::View Offer::Look(std::size_t from) const {
  const std::lock_guard lock(mutex_);
  View view;
  for (std::size_t i = from; i < parts_.size(); ++i) view.parts.push_back(parts_[i]);
  view.complete = complete_;
  view.committed_tokens = committed_tokens_;
  view.ended = ended_;
  return view;
}

absl::StatusOr<std::int64_t> Offer::Add(const std::vector<std::shared_ptr<const StagedPart>>& parts,
                                        bool complete, std::int64_t committed_tokens) {
  std::int64_t bytes = 0;
  {
    const std::lock_guard lock(mutex_);
    if (!ended_.ok()) return ended_;
    parts_.insert(parts_.end(), parts.begin(), parts.end());
    complete_ = complete;
    committed_tokens_ = committed_tokens;
    for (const auto& part : parts_) bytes += part->part.bytes();
  }
  Tell();
  return bytes;
}

void Offer::End(const absl::Status& why) {
  {
    const std::lock_guard lock(mutex_);
    if (ended_.ok()) ended_ = why;
    parts_.clear();  // pullers keep what they read
  }
  Tell();
}

void Offer::Listen(Key key, std::function<void()> listener) {
  const std::lock_guard lock(listeners_mutex_);
  listeners_[key] = std::move(listener);
}

void Offer::Forget(Key key) {
  const std::lock_guard lock(listeners_mutex_);
  listeners_.erase(key);
}

void Offer::Tell() {
  const std::lock_guard lock(listeners_mutex_);
  for (const auto& [key, listener] : listeners_) listener();
}

}  // namespace kvsummary
