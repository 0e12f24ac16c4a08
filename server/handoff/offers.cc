#include "server/handoff/offers.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_format.h"
#include "server/error.h"
#include "server/handoff/handoff_text.h"
#include "server/handoff/move_parts.h"
#include "server/session/random.h"

namespace kvsummary {
namespace {

constexpr std::size_t kRememberedOffers = 4096;  // that have ended

}  // namespace

struct Offers::Entry {
  std::uint64_t session = 0;
  std::uint64_t number = 0;
  std::string secret;
  std::weak_ptr<Cache> cache;  // an offer keeps what it has staged, not the cache
  CacheGeometry geometry;
  std::shared_ptr<const BoundCache> bound;  // until it is complete
  Arena* arena = nullptr;
  int consumers = 1;
  bool detached = false;
  std::int64_t back_off = 0;
  std::chrono::milliseconds lifetime{0};
  Clock::time_point deadline;
  std::shared_ptr<Offer> offer;

  // With mutex_ held:
  Progress progress;
  std::map<std::string, Transfer> transfers;  // by id
};

// Parts that are to be staged at once.
struct Offers::Staging {
  std::shared_ptr<Entry> entry;
  std::shared_ptr<Cache> cache;
  std::shared_ptr<const BoundCache> bound;
  Addition addition;
  Progress progress;  // the entry's, with them
  std::vector<std::shared_ptr<const StagedPart>> parts;
  std::chrono::nanoseconds device_time{0};
};

Offers::Offers(const std::vector<std::unique_ptr<Device>>& devices, Options options)
    : options_(std::move(options)) {
  for (const auto& device : devices) {
    arenas_[device.get()] = std::make_unique<Arena>(*device, options_.bytes_per_device);
  }
  thread_ = std::thread([this] { Run(); });
}

Offers::~Offers() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  thread_.join();
  // Work on the executors holds entries, and extents of the arenas.
  entries_.clear();
  for (auto& [device, arena] : arenas_) {
    std::mutex mutex;
    std::condition_variable done;
    bool idle = false;
    arena->device().executor().SubmitFree([&] {
      const std::lock_guard lock(mutex);
      idle = true;
      done.notify_all();
    });
    std::unique_lock lock(mutex);
    done.wait(lock, [&] { return idle; });
  }
}

// Plans an addition, and reserves its memory. With mutex_ held.
absl::Status Offers::Plan(const Entry& entry, Addition addition, Staging& staging) {
  const OfferedCache from{entry.geometry, staging.bound.get(), entry.offer->groups(), entry.back_off};
  auto planned = PlanAddition(from, entry.progress, addition);
  if (!planned.ok()) return planned.status();
  for (Part& part : planned->parts) {
    auto extent = entry.arena->Reserve(part.bytes());
    if (!extent.ok()) return extent.status();
    auto staged = std::make_shared<StagedPart>();
    staged->number = entry.progress.parts + static_cast<std::int32_t>(staging.parts.size());
    staged->part = std::move(part);
    staged->extent = *std::move(extent);
    staging.parts.push_back(std::move(staged));
  }
  staging.progress = std::move(planned->progress);
  staging.addition = std::move(addition);
  return absl::OkStatus();
}
// (executor) Copies the parts' bytes out of the cache.
absl::Status Offers::Stage(Staging& staging) {
  const Entry& entry = *staging.entry;
  const Addition& addition = staging.addition;
  Cache& cache = *staging.cache;
  if (auto s = entry.arena->Prepare(); !s.ok()) return s;
  std::map<std::int32_t, RequestBlocks> groups;
  for (const Addition::Group& group : addition.groups) groups[group.group] = {group.first, group.blocks};
  for (const auto& staged : staging.parts) {
    const Part& part = staged->part;
    const PartPlace place{.cache = &cache,
                          .bound = staging.bound.get(),
                          .blocks = {addition.first_block, addition.blocks},
                          .groups = groups,
                          .ring_block = addition.tail ? addition.tail->ring_block : 0,
                          .regions = part.first + part.count,
                          .rows_from = 0,
                          .rows_to = kMaxIndex};
    const auto moved = MovePart(cache.device(), place, part, WholePart(part), staged->data(), Toward::kDense);
    if (!moved.ok()) return moved.status();
    staging.device_time += moved->time;
  }
  return absl::OkStatus();
}

// Queues what stages a planned part; the plan holds from then on. With mutex_ held.
absl::Status Offers::Start(const std::shared_ptr<Staging>& staging, absl::AnyInvocable<void() &&> work) {
  Entry& entry = *staging->entry;
  if (auto s = staging->cache->device().executor().Submit(std::move(work)); !s.ok()) return s;
  entry.progress = staging->progress;
  if (entry.progress.complete) entry.bound = nullptr;
  return absl::OkStatus();
}

void Offers::Open(OpenArgs args, absl::AnyInvocable<void(absl::StatusOr<Opened>) &&> done) {
  auto staging = std::make_shared<Staging>();
  auto held = std::make_shared<decltype(done)>(std::move(done));
  const auto work = [this, staging, held] {
    auto bytes = Publish(*staging);
    if (!bytes.ok()) return std::move(*held)(bytes.status());
    const Entry& entry = *staging->entry;
    Opened opened{.number = entry.number,
                  .secret = entry.secret,
                  .lifetime = entry.lifetime,
                  .staged_bytes = *bytes,
                  .committed_tokens = staging->progress.complete ? staging->addition.committed_tokens : -1,
                  .device_time = staging->device_time};
    std::move (*held)(std::move(opened));
  };
  const absl::Status refused = [&]() -> absl::Status {
    if (options_.bytes_per_device == 0) {
      return Refuse(Reason::HANDOFF_OFF, "", "the daemon hands nothing over (--handoff-bytes=0)");
    }
    if (args.consumers < 1 || args.consumers > kMaxConsumers) {
      return Refuse(Reason::COUNT_OUT_OF_RANGE, "consumers",
                    absl::StrFormat("consumers is %d, not between 1 and %d", args.consumers, kMaxConsumers));
    }
    if (args.back_off < 0 || args.back_off > kMaxBackOff) {
      return Refuse(
          Reason::COUNT_OUT_OF_RANGE, "back_off_tokens",
          absl::StrFormat("back_off_tokens is %d, not between 0 and %d", args.back_off, kMaxBackOff));
    }
    if (args.lifetime.count() < 0) {
      return Refuse(Reason::COUNT_OUT_OF_RANGE, "lifetime_milliseconds", "the lifetime is negative");
    }
    auto secret = RandomBytes(kSecretBytes);
    if (!secret.ok()) return secret.status();
    const bool as_long_as_possible = args.lifetime.count() == 0 || args.lifetime > options_.lifetime;
    auto entry = std::make_shared<Entry>();
    entry->session = args.session;
    entry->secret = *std::move(secret);
    entry->cache = args.cache;
    entry->geometry = args.cache->geometry();
    entry->bound = args.bound;
    entry->arena = arenas_.at(&args.cache->device()).get();
    entry->consumers = args.consumers;
    entry->detached = args.detached;
    entry->back_off = args.back_off;
    entry->lifetime = as_long_as_possible ? options_.lifetime : args.lifetime;
    entry->deadline = options_.now() + entry->lifetime;
    const CacheGeometry& g = entry->geometry;
    entry->progress.regions.resize(static_cast<std::size_t>(g.layers));
    entry->offer =
        std::make_shared<Offer>(args.cache->device(), g.layers, g.block_size, std::move(args.group_specs));
    staging->entry = entry;
    staging->cache = std::move(args.cache);
    staging->bound = std::move(args.bound);
    Expire();  // what they hold may be needed
    const std::lock_guard lock(mutex_);
    if (entries_.size() >= kMaxOffers) {
      return Refuse(Reason::HANDOFF_LIMIT, "", absl::StrFormat("the daemon has %d offers", kMaxOffers));
    }
    entry->number = next_number_++;
    if (auto s = Plan(*entry, std::move(args.part), *staging); !s.ok()) return s;
    if (auto s = Start(staging, work); !s.ok()) return s;
    entries_[entry->secret] = entry;
    secrets_[{entry->session, entry->number}] = entry->secret;
    deadlines_.emplace(entry->deadline, entry->secret);
    ++stats_.offered;
    return absl::OkStatus();
  }();
  if (!refused.ok()) return std::move(*held)(refused);
  wake_.notify_all();
}

void Offers::Append(std::uint64_t session, std::uint64_t number, Addition part,
                    absl::AnyInvocable<void(absl::StatusOr<std::int64_t>) &&> done) {
  auto staging = std::make_shared<Staging>();
  auto held = std::make_shared<decltype(done)>(std::move(done));
  const absl::Status refused = [&]() -> absl::Status {
    Expire();
    const std::lock_guard lock(mutex_);
    auto entry = FindLocked(session, number);
    if (!entry.ok()) return entry.status();
    staging->entry = *std::move(entry);
    staging->cache = staging->entry->cache.lock();
    staging->bound = staging->entry->bound;
    if (staging->cache == nullptr) {
      return Refuse(Reason::CACHE_NOT_FOUND, "offer_id", "the cache that the offer is of has been deleted");
    }
    if (staging->entry->progress.complete) {
      return Refuse(Reason::HANDOFF_COMPLETE, "offer_id",
                    absl::StrFormat("offer %d has had its last part", number));
    }
    if (auto s = Plan(*staging->entry, std::move(part), *staging); !s.ok()) return s;
    return Start(staging, [this, staging, held] { std::move (*held)(Publish(*staging)); });
  }();
  if (!refused.ok()) std::move (*held)(refused);
}

// (executor) Stages a part and shows it, or ends the offer. Answers what is staged of the offer.
absl::StatusOr<std::int64_t> Offers::Publish(Staging& staging) {
  Entry& entry = *staging.entry;
  const absl::Status staged = Stage(staging);
  staging.cache = nullptr;
  staging.bound = nullptr;
  const std::vector<std::shared_ptr<const StagedPart>> parts = std::move(staging.parts);
  if (!staged.ok()) {
    {
      const std::lock_guard lock(mutex_);
      RemoveLocked(entry.secret, staged);
    }
    entry.offer->End(staged);
    return staged;
  }
  return entry.offer->Add(parts, staging.progress.complete, staging.addition.committed_tokens);
}

std::shared_ptr<Offers::Entry> Offers::RemoveLocked(const std::string& secret, const absl::Status& why) {
  auto found = entries_.extract(secret);
  if (found.empty()) return nullptr;
  secrets_.erase({found.mapped()->session, found.mapped()->number});
  deadlines_.erase({found.mapped()->deadline, secret});
  ended_.push_back({secret, why, found.mapped()->transfers});
  if (ended_.size() > kRememberedOffers) ended_.pop_front();
  return std::move(found.mapped());
}

void Offers::Cancel(std::uint64_t session, std::uint64_t number) {
  std::string secret;
  {
    const std::lock_guard lock(mutex_);
    const auto found = secrets_.find({session, number});
    if (found == secrets_.end()) return;
    secret = found->second;
  }
  Cancel(secret);
}

void Offers::Cancel(const std::string& secret) {
  const absl::Status why = Refuse(Reason::HANDOFF_CANCELLED, "handoff", "the offer has been cancelled");
  std::shared_ptr<Entry> entry;
  {
    const std::lock_guard lock(mutex_);
    entry = RemoveLocked(secret, why);
    if (entry == nullptr) return;
    ++stats_.cancelled;
  }
  entry->offer->End(why);
}

void Offers::EndSession(std::uint64_t session) {
  const absl::Status why = Refuse(Reason::HANDOFF_CANCELLED, "handoff", "the session that offered has ended");
  std::vector<std::shared_ptr<Entry>> entries;
  {
    const std::lock_guard lock(mutex_);
    std::vector<std::string> secrets;
    for (auto it = secrets_.lower_bound({session, 0}); it != secrets_.end() && it->first.first == session;
         ++it) {
      if (!entries_.at(it->second)->detached) secrets.push_back(it->second);
    }
    for (const std::string& secret : secrets) entries.push_back(RemoveLocked(secret, why));
    stats_.cancelled += std::ssize(entries);
  }
  for (const auto& entry : entries) entry->offer->End(why);
}

absl::StatusOr<std::shared_ptr<Offers::Entry>> Offers::FindLocked(const std::string& secret) const {
  if (const auto found = entries_.find(secret); found != entries_.end()) return found->second;
  const auto ended =
      std::find_if(ended_.rbegin(), ended_.rend(), [&](const Ended& e) { return e.secret == secret; });
  if (ended != ended_.rend()) return ended->why;
  return Refuse(Reason::HANDOFF_NOT_FOUND, "handoff", "the daemon has no such offer");
}

absl::StatusOr<std::shared_ptr<Offers::Entry>> Offers::FindLocked(std::uint64_t session,
                                                                  std::uint64_t number) const {
  const auto secret = secrets_.find({session, number});
  if (secret != secrets_.end()) return entries_.at(secret->second);
  return Refuse(Reason::HANDOFF_NOT_FOUND, "offer_id",
                absl::StrFormat("the session has no offer %d, or not any more", number));
}

absl::StatusOr<CacheGeometry> Offers::GeometryOf(std::uint64_t session, std::uint64_t number) const {
  const std::lock_guard lock(mutex_);
  const auto entry = FindLocked(session, number);
  if (!entry.ok()) return entry.status();
  return (*entry)->geometry;
}

absl::StatusOr<std::shared_ptr<Offer>> Offers::Bind(const std::string& secret, const std::string& transfer) {
  Expire();
  const std::lock_guard lock(mutex_);
  const auto entry = FindLocked(secret);
  if (!entry.ok()) return entry.status();
  auto& transfers = (*entry)->transfers;
  const auto bound = transfers.find(transfer);
  if (bound == transfers.end() ? std::ssize(transfers) >= (*entry)->consumers : bound->second.acknowledged) {
    return Refuse(Reason::HANDOFF_TAKEN, "handoff",
                  absl::StrFormat("the offer is for %d consumers, who have it", (*entry)->consumers));
  }
  ++transfers[transfer].binds;
  return (*entry)->offer;
}

absl::Status Offers::Acknowledge(const std::string& secret, const std::string& transfer) {
  Expire();
  const absl::Status why =
      Refuse(Reason::HANDOFF_NOT_FOUND, "handoff", "every consumer has had the offer: it is no more");
  std::shared_ptr<Entry> gone;
  {
    const std::lock_guard lock(mutex_);
    const auto entry = FindLocked(secret);
    if (!entry.ok()) {
      // Of several who have read under one id, one acknowledged: another may have read on after the end.
      const bool repeated = std::any_of(ended_.begin(), ended_.end(), [&](const Ended& e) {
        const auto bound = e.transfers.find(transfer);
        return e.secret == secret && bound != e.transfers.end() && bound->second.acknowledged &&
               bound->second.binds == 1;
      });
      return repeated ? absl::OkStatus() : entry.status();
    }
    auto& transfers = (*entry)->transfers;
    const auto bound = transfers.find(transfer);
    if (bound == transfers.end()) {
      return Refuse(Reason::HANDOFF_NOT_FOUND, "transfer_id", "the offer has no such consumer");
    }
    bound->second.acknowledged = true;
    const auto have = std::count_if(transfers.begin(), transfers.end(),
                                    [](const auto& t) { return t.second.acknowledged; });
    if (have < (*entry)->consumers) return absl::OkStatus();
    gone = RemoveLocked(secret, why);
    ++stats_.completed;
  }
  gone->offer->End(why);
  return absl::OkStatus();
}

void Offers::Expire() {
  const absl::Status why = Refuse(Reason::HANDOFF_EXPIRED, "handoff", "the offer's time is over");
  std::vector<std::shared_ptr<Entry>> entries;
  {
    const std::lock_guard lock(mutex_);
    const auto now = options_.now();
    while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
      const std::string secret = deadlines_.begin()->second;
      entries.push_back(RemoveLocked(secret, why));
    }
    stats_.expired += std::ssize(entries);
  }
  for (const auto& entry : entries) entry->offer->End(why);
}

void Offers::Run() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    if (deadlines_.empty()) {
      wake_.wait(lock);
    } else {
      wake_.wait_for(lock, deadlines_.begin()->first - options_.now());
    }
    if (stopping_) return;
    lock.unlock();
    Expire();
    lock.lock();
  }
}

Offers::Stats Offers::stats() const {
  const std::lock_guard lock(mutex_);
  Stats stats = stats_;
  stats.offers = std::ssize(entries_);
  for (const auto& [device, arena] : arenas_) stats.staged_bytes += arena->used_bytes();
  return stats;
}

const Arena* Offers::arena(const Device& device) const { return arenas_.at(&device).get(); }

}  // namespace kvsummary
