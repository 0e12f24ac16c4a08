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

  // What has been planned, of which the executor may have staged less.
  struct Plan {
    std::vector<std::int64_t> regions;                // by layer, from the first on
    std::map<std::int32_t, std::int64_t> group_ends;  // first block that is not there, by group
    std::int32_t parts = 0;
    bool complete = false;
  };
  Plan plan;                              // with mutex_ held, as what follows
  std::map<std::string, bool> transfers;  // by id: whether acknowledged
};

// Parts that are to be staged at once.
struct Offers::Staging {
  std::shared_ptr<Entry> entry;
  std::shared_ptr<Cache> cache;
  std::shared_ptr<const BoundCache> bound;
  PartArgs args;
  Entry::Plan plan;  // the entry's, with them
  std::vector<std::shared_ptr<StagedPart>> parts;
  std::chrono::nanoseconds device_time{0};
};

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

// Checks a part against what there is already, and reserves its memory. With mutex_ held.
absl::Status Offers::PlanPart(const Entry& entry, PartArgs args, Staging& staging) {
  const CacheGeometry& g = entry.geometry;
  const std::int64_t n = args.committed_tokens;
  if (args.layers.first < 0 || args.layers.count < 1 || args.layers.first > g.layers - args.layers.count) {
    return Refuse(Reason::LAYERS_OUT_OF_RANGE, "layers",
                  absl::StrFormat("layers %d + %d are not a range of the cache's %d", args.layers.first,
                                  args.layers.count, g.layers));
  }
  if (n < 0 || n > kMaxIndex) {
    return Refuse(Reason::POSITION_OUT_OF_RANGE, "committed_tokens",
                  absl::StrFormat("committed_tokens is %d, not between 0 and 2^31 - 1", n));
  }
  const std::int64_t before = entry.plan.regions[static_cast<std::size_t>(args.layers.first)];
  const std::int64_t regions = n / kRegionTokens;
  std::vector<std::int64_t> after = entry.plan.regions;
  for (int l = args.layers.first; l < args.layers.first + args.layers.count; ++l) {
    const std::int64_t has = entry.plan.regions[static_cast<std::size_t>(l)];
    if (has != before || has > regions) {
      return Refuse(Reason::HANDOFF_INCOMPLETE, "committed_tokens",
                    absl::StrFormat("layer %d has %d regions so far: a part of %d regions needs layers of as "
                                    "many, at most its own (layer %d: %d)",
                                    l, has, regions, args.layers.first, before));
    }
    after[static_cast<std::size_t>(l)] = regions;
  }
  const RequestBlocks blocks{args.first_block, args.blocks};
  if (auto s = CheckBlocks(g, blocks, before, regions, "block_ids"); !s.ok()) return s;

  std::vector<Part> parts;
  if (regions > before) {
    parts.push_back({.kind = PartKind::kSummaries,
                     .layers = args.layers,
                     .first = before,
                     .count = regions - before,
                     .unit_bytes = kSummaryBytes});
  }
  auto group_ends = entry.plan.group_ends;
  std::set<std::int32_t> named;
  for (std::size_t i = 0; i < args.groups.size(); ++i) {
    const Group& group = args.groups[i];
    const std::string field = absl::StrFormat("groups[%d]", i);
    if (auto s = CheckGroup(staging.bound.get(), entry.offer->groups(), group.group, field); !s.ok())
      return s;
    if (auto s = CheckIds(group.blocks, staging.bound->blocks, field + ".block_ids"); !s.ok()) return s;
    std::int64_t& end = group_ends[group.group];
    if (group.first < end || group.first > kMaxIndex) {
      return Refuse(
          Reason::COUNT_OUT_OF_RANGE, field + ".first_block_index",
          absl::StrFormat("first_block_index is %d; the group has blocks up to %d", group.first, end));
    }
    if (!named.insert(group.group).second) {
      return Refuse(Reason::GROUP_OUT_OF_RANGE, field + ".group", "the group is named twice");
    }
    if (group.blocks.empty()) continue;
    end = group.first + std::ssize(group.blocks);
    parts.push_back(
        {.kind = PartKind::kBlocks,
         .first = group.first,
         .count = std::ssize(group.blocks),
         .unit_bytes = entry.offer->groups()[static_cast<std::size_t>(group.group)].bytes_per_block,
         .group = group.group});
  }
  if (args.tail) {
    const auto short_of = std::find_if(after.begin(), after.end(), [&](auto has) { return has != regions; });
    if (short_of != after.end()) {
      return Refuse(Reason::HANDOFF_INCOMPLETE, "committed_tokens",
                    absl::StrFormat("layer %d has %d regions; the request's last part ends with %d",
                                    short_of - after.begin(), *short_of, regions));
    }
    if (auto s = CheckRingBlock(g, args.tail->ring_block, "ring"); !s.ok()) return s;
    const std::int64_t highest = args.tail->highest_stored.value_or(std::max<std::int64_t>(0, n - 1 + g.k));
    if (highest < n - 1 || highest > kMaxIndex) {
      return Refuse(
          Reason::POSITION_OUT_OF_RANGE, "highest_stored_position",
          absl::StrFormat("highest_stored_position is %d, not between %d and 2^31 - 1", highest, n - 1));
    }
    auto positions = TailPositions(n, entry.back_off, highest, g.capacity);
    if (!positions.empty()) {
      const std::int64_t count = std::ssize(positions);
      parts.push_back({.kind = PartKind::kRows,
                       .layers = {0, g.layers},
                       .count = count,
                       .unit_bytes = kRowBytes,
                       .positions = std::move(positions)});
    }
  }
  if (entry.plan.parts + std::ssize(parts) > kMaxOfferParts) {
    return Refuse(Reason::HANDOFF_LIMIT, "",
                  absl::StrFormat("an offer has at most %d parts", kMaxOfferParts));
  }

  for (Part& part : parts) {
    auto extent = entry.arena->Reserve(part.bytes());
    if (!extent.ok()) return extent.status();
    auto staged = std::make_shared<StagedPart>();
    staged->number = entry.plan.parts + static_cast<std::int32_t>(staging.parts.size());
    staged->part = std::move(part);
    staged->extent = *std::move(extent);
    staging.parts.push_back(std::move(staged));
  }
  staging.plan = {.regions = std::move(after),
                  .group_ends = std::move(group_ends),
                  .parts = entry.plan.parts + static_cast<std::int32_t>(staging.parts.size()),
                  .complete = args.tail.has_value()};
  staging.args = std::move(args);
  return absl::OkStatus();
}

// (executor) Copies the parts' bytes out of the cache.
absl::Status Offers::Stage(Staging& staging) {
  const Entry& entry = *staging.entry;
  Cache& cache = *staging.cache;
  if (auto s = entry.arena->Prepare(); !s.ok()) return s;
  std::map<std::int32_t, RequestBlocks> groups;
  for (const Group& group : staging.args.groups) groups[group.group] = {group.first, group.blocks};
  for (const auto& staged : staging.parts) {
    const Part& part = staged->part;
    const PartPlace place{.cache = &cache,
                          .bound = staging.bound.get(),
                          .blocks = {staging.args.first_block, staging.args.blocks},
                          .groups = groups,
                          .ring_block = staging.args.tail ? staging.args.tail->ring_block : 0,
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
  entry.plan = staging->plan;
  if (entry.plan.complete) entry.bound = nullptr;
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
                  .committed_tokens = staging->plan.complete ? staging->args.committed_tokens : -1,
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
    entry->plan.regions.resize(static_cast<std::size_t>(g.layers));
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
    if (auto s = PlanPart(*entry, std::move(args.part), *staging); !s.ok()) return s;
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

void Offers::Append(std::uint64_t session, std::uint64_t number, PartArgs part,
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
    if (staging->entry->plan.complete) {
      return Refuse(Reason::HANDOFF_COMPLETE, "offer_id",
                    absl::StrFormat("offer %d has had its last part", number));
    }
    if (auto s = PlanPart(*staging->entry, std::move(part), *staging); !s.ok()) return s;
    return Start(staging, [this, staging, held] { std::move (*held)(Publish(*staging)); });
  }();
  if (!refused.ok()) std::move (*held)(refused);
}

// (executor) Stages a part and shows it, or ends the offer. Answers what is staged of the offer.
absl::StatusOr<std::int64_t> Offers::Publish(Staging& staging) {
  Entry& entry = *staging.entry;
  Offer& offer = *entry.offer;
  const absl::Status staged = Stage(staging);
  staging.cache = nullptr;
  staging.bound = nullptr;
  const std::vector<std::shared_ptr<StagedPart>> parts = std::move(staging.parts);
  if (!staged.ok()) {
    {
      const std::lock_guard lock(mutex_);
      RemoveLocked(entry.secret, staged);
    }
    Tell(entry, staged);
    return staged;
  }
  std::int64_t bytes = 0;
  {
    const std::lock_guard lock(offer.mutex_);
    if (!offer.ended_.ok()) return offer.ended_;
    offer.parts_.insert(offer.parts_.end(), parts.begin(), parts.end());
    offer.complete_ = staging.plan.complete;
    offer.committed_tokens_ = staging.args.committed_tokens;
    for (const auto& part : offer.parts_) bytes += part->part.bytes();
  }
  offer.Tell();
  return bytes;
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

void Offers::Tell(Entry& entry, const absl::Status& why) {
  Offer& offer = *entry.offer;
  {
    const std::lock_guard lock(offer.mutex_);
    if (offer.ended_.ok()) offer.ended_ = why;
    offer.parts_.clear();  // pullers keep what they read
  }
  offer.Tell();
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
  Tell(*entry, why);
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
  for (const auto& entry : entries) Tell(*entry, why);
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
  if (bound == transfers.end() ? std::ssize(transfers) >= (*entry)->consumers : bound->second) {
    return Refuse(Reason::HANDOFF_TAKEN, "handoff",
                  absl::StrFormat("the offer is for %d consumers, who have it", (*entry)->consumers));
  }
  transfers.emplace(transfer, false);
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
      const bool completed = std::any_of(ended_.begin(), ended_.end(), [&](const Ended& e) {
        const auto bound = e.transfers.find(transfer);
        return e.secret == secret && bound != e.transfers.end() && bound->second;
      });
      return completed ? absl::OkStatus() : entry.status();
    }
    auto& transfers = (*entry)->transfers;
    const auto bound = transfers.find(transfer);
    if (bound == transfers.end()) {
      return Refuse(Reason::HANDOFF_NOT_FOUND, "transfer_id", "the offer has no such consumer");
    }
    bound->second = true;
    const auto have =
        std::count_if(transfers.begin(), transfers.end(), [](const auto& t) { return t.second; });
    if (have < (*entry)->consumers) return absl::OkStatus();
    gone = RemoveLocked(secret, why);
    ++stats_.completed;
  }
  Tell(*gone, why);
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
  for (const auto& entry : entries) Tell(*entry, why);
}

void Offers::Run() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    if (deadlines_.empty()) {
      wake_.wait(lock);
    } else {
      const Clock::time_point next = deadlines_.begin()->first;  // a copy: the set changes meanwhile
      wake_.wait_until(lock, next);
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
