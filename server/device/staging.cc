#include "server/device/staging.h"

namespace kvsummary {

absl::Status Staging::Half::Await() {
  State& state = staging_->states_[index_];
  if (state == State::kOut) {
    if (auto s = staging_->Fence(index_); !s.ok()) return s;
  }
  if (auto s = staging_->fences_.Await(index_); !s.ok()) return staging_->broken_ = std::move(s);
  state = State::kOutAwaited;
  return absl::OkStatus();
}

absl::StatusOr<Staging::Half> Staging::Next() {
  if (!broken_.ok()) return broken_;
  State& state = states_[next_];
  if (state != State::kFree && state != State::kFenced)
    return absl::InternalError("both halves of the staging memory are in use");
  if (state == State::kFenced) {
    if (auto s = fences_.Await(next_); !s.ok()) return broken_ = std::move(s);
  }
  state = State::kOut;
  return Half(this, std::exchange(next_, 1 - next_));
}

absl::Status Staging::Fence(int half) {
  states_[half] = State::kOutFenced;
  auto status = fences_.Set(half);
  if (!status.ok()) broken_ = status;
  return status;
}

void Staging::LetGo(int half) {
  if (states_[half] == State::kOut) static_cast<void>(Fence(half));  // kept in broken_
  states_[half] = states_[half] == State::kOutAwaited ? State::kFree : State::kFenced;
}

}  // namespace kvsummary
