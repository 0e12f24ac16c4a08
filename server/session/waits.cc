#include "server/session/waits.h"

#include <pthread.h>
#include <sys/prctl.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_format.h"
#include "server/error.h"

namespace kvsummary {
namespace {

using std::chrono::microseconds;

// After the last event, how long the thread spins, and between what bounds it naps.
constexpr Waits::Clock::duration kSpin = microseconds(50);
constexpr Waits::Clock::duration kShortestNap = microseconds(50);
constexpr Waits::Clock::duration kLongestNap = microseconds(1000);
// A nap adds at most this share to the time that has been waited.
constexpr int kNapShare = 8;

}  // namespace

struct Waits::Wait {
  std::shared_ptr<Session> session;
  Counter counter;
  std::string field;
  Done done;
  Clock::time_point deadline;
  std::atomic<bool> cancelled = false;
};

Waits::Waits(Options options) : options_(std::move(options)), thread_([this] { Run(); }) {}

Waits::~Waits() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_one();
  thread_.join();
}

absl::StatusOr<std::weak_ptr<Waits::Wait>> Waits::Start(std::shared_ptr<Session> session, Counter counter,
                                                        std::string field, Done done) {
  const auto deadline = options_.now() + options_.limit;
  const Session* key = session.get();
  std::shared_ptr<Wait> wait(
      new Wait{std::move(session), std::move(counter), std::move(field), std::move(done), deadline});
  {
    std::lock_guard lock(mutex_);
    int& count = counts_[key];
    if (count == options_.max_per_session) {
      return Refuse(Reason::SESSION_LIMIT, wait->field,
                    absl::StrFormat("%d steps of the session wait for counters already", count));
    }
    ++count;
    started_.push_back(wait);
    woken_ = true;
  }
  wake_.notify_one();
  return wait;
}

void Waits::Cancel(const std::weak_ptr<Wait>& wait) {
  const auto started = wait.lock();
  if (started == nullptr) return;
  {
    std::lock_guard lock(mutex_);
    started->cancelled = true;
    woken_ = true;
  }
  wake_.notify_one();
}

std::optional<absl::Status> Waits::Outcome(const Wait& wait) const {
  if (wait.cancelled || stopping_) return absl::CancelledError("cancelled while waiting for a counter");
  if (wait.session->ended()) {
    return Refuse(Reason::SESSION_ENDED, "shared.session_id", "the session ended while the step waited");
  }
  if (wait.counter.Reached()) return absl::OkStatus();
  if (options_.now() >= wait.deadline) {
    return Refuse(Reason::WAIT_TIMEOUT, wait.field,
                  absl::StrFormat("%s did not reach its value within %d s", wait.field,
                                  std::chrono::duration_cast<std::chrono::seconds>(options_.limit).count()));
  }
  return std::nullopt;
}

int Waits::Count(const Session& session) const {
  std::lock_guard lock(mutex_);
  const auto it = counts_.find(&session);
  return it == counts_.end() ? 0 : it->second;
}

void Waits::Release(const Session* session) {
  std::lock_guard lock(mutex_);
  const auto it = counts_.find(session);
  if (--it->second == 0) counts_.erase(it);
}

void Waits::Run() {
  pthread_setname_np(pthread_self(), "waits");
  prctl(PR_SET_TIMERSLACK, 1000UL);  // ns; the default would double a short nap
  std::vector<std::shared_ptr<Wait>> waiting;
  auto last_event = Clock::now();
  while (true) {
    {
      std::unique_lock lock(mutex_);
      const auto woken = [this] { return woken_ || stopping_; };
      if (waiting.empty()) {
        wake_.wait(lock, woken);
      } else if (const auto idle = Clock::now() - last_event; idle >= kSpin) {
        wake_.wait_for(lock, std::clamp<Clock::duration>(idle / kNapShare, kShortestNap, kLongestNap), woken);
      }
      if (woken_) last_event = Clock::now();
      woken_ = false;
      std::move(started_.begin(), started_.end(), std::back_inserter(waiting));
      started_.clear();
      if (stopping_ && waiting.empty()) return;
    }
    const auto ended = [&](const std::shared_ptr<Wait>& wait) {
      auto outcome = Outcome(*wait);
      if (!outcome) return false;
      Release(wait->session.get());
      std::move(wait->done)(*std::move(outcome));
      wait->done = nullptr;
      last_event = Clock::now();
      return true;
    };
    std::erase_if(waiting, ended);
    if (!waiting.empty()) std::this_thread::yield();
  }
}

}  // namespace kvsummary
