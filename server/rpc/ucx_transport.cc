#include "server/rpc/ucx_transport.h"

#include <spdlog/spdlog.h>

#include <cstring>
#include <utility>

#include "server/rpc/grpc_thread.h"
#include "server/session/random.h"

namespace kvsummary {
namespace {

constexpr std::int64_t kSlots = 32;  // chunks under way
constexpr std::chrono::seconds kRestartPause{5};

}  // namespace

absl::StatusOr<std::unique_ptr<UcxTransport>> UcxTransport::Start(Options options) {
  std::unique_ptr<UcxTransport> transport(new UcxTransport(std::move(options)));
  auto memory = AllocateHostMemory(kSlots * kChunkBytes);
  if (!memory.ok()) return memory.status();
  transport->landing_memory_ = *std::move(memory);
  for (std::int64_t slot = 0; slot < kSlots; ++slot) transport->free_slots_.push_back(slot);
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

std::unique_ptr<UcxTransport::Loan> UcxTransport::Borrow(const Memory& staging) {
  if (staging.kind() != MemoryKind::kMemfd) return nullptr;
  const auto token = RandomBytes(sizeof(std::uint64_t));
  if (!token.ok()) return nullptr;
  const std::lock_guard lock(mutex_);
  auto helper = LiveHelper();
  if (helper == nullptr) return nullptr;
  auto known = staging_.find(&staging);
  if (known == staging_.end()) {
    const auto number = helper->AddStaging(staging.descriptor(), staging.bytes());
    if (!number.ok()) return nullptr;
    known = staging_.emplace(&staging, *number).first;
  }
  std::unique_ptr<Loan> loan(new Loan());
  std::memcpy(&loan->token_, token->data(), sizeof(loan->token_));
  loan->staging_ = known->second;
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

void UcxTransport::Fetch(const Place& place, std::int64_t bytes,
                         absl::AnyInvocable<void(absl::StatusOr<std::string>) &&> done) {
  const std::lock_guard lock(mutex_);
  waiting_.push_back({place, bytes, std::move(done)});
  Next();
}

void UcxTransport::Next() {
  while (!waiting_.empty() && !free_slots_.empty()) {
    Waiting fetch = std::move(waiting_.front());
    waiting_.pop_front();
    const auto helper = helper_;
    if (helper == nullptr) {  // it is over
      OnGrpcThread([done = std::make_shared<decltype(fetch.done)>(std::move(fetch.done))] {
        std::move (*done)(absl::UnavailableError("the daemon ends"));
      });
      continue;
    }
    const std::int64_t slot = free_slots_.back();
    free_slots_.pop_back();
    auto done = std::make_shared<decltype(fetch.done)>(std::move(fetch.done));
    const auto fetched = [this, slot, bytes = fetch.bytes, done](const absl::Status& status) {
      // A copy: who reaches UCX's port can write to landing memory at any time, also after it was checked.
      OnGrpcThread([this, slot, bytes, done, status] {
        absl::StatusOr<std::string> result = std::string();
        if (status.ok()) {
          result->assign(static_cast<const char*>(landing_memory_->data()) + slot * kChunkBytes,
                         static_cast<std::size_t>(bytes));
        } else {
          result = status;
        }
        {
          const std::lock_guard lock(mutex_);
          free_slots_.push_back(slot);
          Next();
          idle_.notify_all();
        }
        std::move (*done)(std::move(result));
      });
    };
    helper->Fetch({.peer = fetch.place.peer,
                   .token = fetch.place.token,
                   .staging = fetch.place.staging,
                   .from = fetch.place.offset,
                   .bytes = fetch.bytes,
                   .landing = landing_,
                   .to = slot * kChunkBytes},
                  fetched);
  }
}

}  // namespace kvsummary
