#include "server/rpc/ucx_transport.h"

#include <spdlog/spdlog.h>

#include <cstring>
#include <utility>

#include "server/rpc/grpc_thread.h"
#include "server/session/random.h"

namespace kvsummary {
namespace {

// Chunks under way: two windows of a peer's. More would leave the processors' caches before they are copied.
constexpr std::int64_t kSlots = 2 * kUcxPeerFetches;
constexpr std::int64_t kKeptBuffers = 32;  // as many chunks as a stream has credit for may wait to be written
constexpr std::chrono::seconds kRestartPause{5};

}  // namespace

// Places of kChunkBytes for copies, used again and again: new ones would be pages that are not there yet.
class UcxTransport::Buffers : public std::enable_shared_from_this<Buffers> {
 public:
  // Any number; a few that come back are kept.
  std::shared_ptr<char> Take() {
    std::unique_ptr<char[]> buffer;
    {
      const std::lock_guard lock(mutex_);
      if (!free_.empty()) {
        buffer = std::move(free_.back());
        free_.pop_back();
      }
    }
    if (buffer == nullptr) buffer.reset(new char[kChunkBytes]);
    return {buffer.release(), [self = shared_from_this()](char* data) { self->Return(data); }};
  }

 private:
  void Return(char* data) {
    std::unique_ptr<char[]> buffer(data);
    const std::lock_guard lock(mutex_);
    if (std::ssize(free_) < kKeptBuffers) free_.push_back(std::move(buffer));
  }

  std::mutex mutex_;
  std::vector<std::unique_ptr<char[]>> free_;
};

UcxTransport::UcxTransport(Options options)
    : options_(std::move(options)), buffers_(std::make_shared<Buffers>()), thread_([this] { Run(); }) {}

absl::StatusOr<std::unique_ptr<UcxTransport>> UcxTransport::Start(Options options) {
  std::unique_ptr<UcxTransport> transport(new UcxTransport(std::move(options)));
  for (std::int64_t slot = 0; slot < kSlots; ++slot) transport->free_slots_.push_back(slot);
  auto memory = AllocateLandingMemory(kSlots * kChunkBytes);
  if (!memory.ok()) return memory.status();
  transport->landing_memory_ = *std::move(memory);
  if (auto s = transport->StartHelper(); !s.ok()) return s;
  return transport;
}

UcxTransport::~UcxTransport() {
  std::shared_ptr<UcxHelper> helper;
  {
    const std::lock_guard lock(mutex_);
    helper.swap(helper_);
  }
  helper.reset();  // ends what it fetches, unless a loan still has it
  std::unique_lock lock(mutex_);
  idle_.wait(lock, [this] { return !starting_; });
  helper.swap(helper_);  // of a start that was under way
  lock.unlock();
  helper.reset();
  lock.lock();
  idle_.wait(lock, [this] { return waiting_.empty() && std::ssize(free_slots_) == kSlots; });
  lock.unlock();
  {
    const std::lock_guard landed(landed_mutex_);
    over_ = true;
  }
  landed_wake_.notify_all();
  thread_.join();
}

absl::Status UcxTransport::StartHelper() {
  auto helper = UcxHelper::Start({.binary = options_.binary, .net_device = options_.net_device});
  if (!helper.ok()) return helper.status();
  auto landing = (*helper)->AddLanding(landing_memory_->descriptor(), landing_memory_->bytes());
  if (!landing.ok()) return landing.status();
  const std::lock_guard lock(mutex_);
  started_ = std::chrono::steady_clock::now();
  staging_.clear();
  helper_ = *std::move(helper);
  landing_ = *landing;
  return absl::OkStatus();
}

std::shared_ptr<UcxHelper> UcxTransport::LiveHelper() {
  if (helper_ != nullptr && helper_->alive()) return helper_;
  if (helper_ != nullptr && !starting_ && std::chrono::steady_clock::now() - started_ > kRestartPause) {
    starting_ = true;
    started_ = std::chrono::steady_clock::now();
    spdlog::warn("the UCX helper has ended: starting another");
    OnGrpcThread([this] {  // it takes a while
      if (auto s = StartHelper(); !s.ok()) spdlog::error("no UCX: {}", std::string(s.message()));
      const std::lock_guard lock(mutex_);
      starting_ = false;
      idle_.notify_all();
    });
  }
  return nullptr;
}

std::string UcxTransport::version() {
  const std::lock_guard lock(mutex_);
  const auto helper = LiveHelper();
  return helper == nullptr ? "" : helper->version();
}

std::optional<std::uint32_t> UcxTransport::Staged(const Memory& staging, std::shared_ptr<UcxHelper>& helper) {
  const auto find = [&]() -> std::optional<std::uint32_t> {
    const std::lock_guard lock(mutex_);
    helper = LiveHelper();
    const auto known = staging_.find(&staging);
    if (helper == nullptr || known == staging_.end()) return std::nullopt;
    return known->second;
  };
  if (const auto number = find(); number || helper == nullptr) return number;
  const std::lock_guard one_at_a_time(adding_);
  if (const auto number = find(); number || helper == nullptr) return number;  // another has added it
  const auto added = helper->AddStaging(staging.descriptor(), staging.bytes());
  if (!added.ok()) return std::nullopt;
  const std::lock_guard lock(mutex_);
  if (helper != helper_) return std::nullopt;  // it has died, and the next does not have the memory
  staging_.emplace(&staging, *added);
  return *added;
}

std::unique_ptr<UcxTransport::Loan> UcxTransport::Borrow(const Memory& staging) {
  if (staging.kind() != MemoryKind::kMemfd) return nullptr;
  const auto token = RandomBytes(sizeof(std::uint64_t));
  if (!token.ok()) return nullptr;
  std::shared_ptr<UcxHelper> helper;
  const auto number = Staged(staging, helper);
  if (!number) return nullptr;
  std::unique_ptr<Loan> loan(new Loan());
  std::memcpy(&loan->token_, token->data(), sizeof(loan->token_));
  loan->staging_ = *number;
  loan->address_ = helper->address();
  loan->helper_ = std::move(helper);
  return loan;
}

bool UcxTransport::Loan::Lend(const std::shared_ptr<const StagedPart>& staged) {
  if (!helper_->Lend(token_, staging_, staged->extent.offset(), staged->part.bytes()).ok()) return false;
  parts_.push_back(staged);
  return true;
}

UcxTransport::Loan::~Loan() {
  if (helper_ == nullptr) return;
  // The last hold on the helper must not be let go of on its own thread.
  helper_->Revoke(token_, [helper = helper_, parts = std::move(parts_)]() mutable {
    OnGrpcThread([helper = std::move(helper), parts = std::move(parts)] {});
  });
}

void UcxTransport::Fetch(const Place& place, std::int64_t bytes, Done done) {
  const std::lock_guard lock(mutex_);
  waiting_.push_back({place, bytes, std::move(done)});
  Next();
}

void UcxTransport::Next() {
  while (!waiting_.empty() && !free_slots_.empty()) {
    Waiting fetch = std::move(waiting_.front());
    waiting_.pop_front();
    const auto helper = LiveHelper();
    if (helper == nullptr) {
      Land(
          {.status = absl::UnavailableError("the UCX helper is not running"), .done = std::move(fetch.done)});
      continue;
    }
    const std::int64_t slot = free_slots_.back();
    free_slots_.pop_back();
    helper->Fetch({.peer = fetch.place.peer,
                   .token = fetch.place.token,
                   .staging = fetch.place.staging,
                   .from = fetch.place.offset,
                   .bytes = fetch.bytes,
                   .landing = landing_,
                   .to = slot * kChunkBytes},
                  [this, slot, bytes = fetch.bytes, done = std::move(fetch.done)](absl::Status s) mutable {
                    Land({.status = std::move(s), .slot = slot, .bytes = bytes, .done = std::move(done)});
                  });
  }
}

void UcxTransport::Land(Landed landed) {
  {
    const std::lock_guard lock(landed_mutex_);
    landed_.push_back(std::move(landed));
  }
  landed_wake_.notify_one();
}

void UcxTransport::Run() {
  std::unique_lock lock(landed_mutex_);
  while (true) {
    landed_wake_.wait(lock, [this] { return over_ || !landed_.empty(); });
    if (landed_.empty()) return;
    Landed landed = std::move(landed_.front());
    landed_.pop_front();
    lock.unlock();
    Deliver(std::move(landed));
    lock.lock();
  }
}

void UcxTransport::Deliver(Landed landed) {
  absl::StatusOr<Bytes> result = Bytes();
  if (landed.status.ok()) {
    const std::shared_ptr<char> copy = buffers_->Take();
    std::memcpy(copy.get(), static_cast<const char*>(landing_memory_->data()) + landed.slot * kChunkBytes,
                static_cast<std::size_t>(landed.bytes));
    result = copy;
  } else {
    result = std::move(landed.status);
  }
  if (landed.slot != kNoSlot) {
    const std::lock_guard lock(mutex_);
    free_slots_.push_back(landed.slot);
    Next();
    idle_.notify_all();
  }
  std::move(landed.done)(std::move(result));
}

}  // namespace kvsummary
