#include "server/store/page_store.h"

#include <algorithm>
#include <random>
#include <thread>
#include <utility>

#include "absl/strings/str_format.h"
#include "server/error.h"
#include "server/store/page_store_impl.h"
#include "server/store/validate.h"

namespace kvsummary {
namespace {

std::uint64_t RandomNumber() {
  std::random_device source;
  return std::uint64_t{source()} << 32 | source();
}

// One thread sums some 5 to 10 GB/s; four keep up with what a device copies from host memory.
int ChecksumHelpers() {
  constexpr int kHelpers = 3;
  return std::clamp(static_cast<int>(std::thread::hardware_concurrency()) - 1, 0, kHelpers);
}

std::vector<Catalog::TierSpec> TierSpecs(const TierMemory& memory) {
  std::vector<Catalog::TierSpec> specs;
  for (std::size_t t = 0; t < memory.tier_count(); ++t) {
    const std::string& name = memory.device(t).name();
    // With no GPU both tiers are the host's.
    specs.push_back({t == 0           ? "host"
                     : name == "host" ? "host-upper"
                                      : name,
                     memory.capacity_bytes(t), t == 0 ? nullptr : &memory.device(t)});
  }
  return specs;
}

}  // namespace

PageStore::Impl::Impl(std::unique_ptr<TierMemory> tiers, const Options& o)
    : options(o),
      memory(std::move(tiers)),
      catalog(TierSpecs(*memory), {.policy = o.policy,
                                   .quota_bytes = o.namespace_quota_bytes,
                                   .max_lease = o.max_lease,
                                   .first_sequence = o.first_sequence,
                                   .event_log_bytes = o.event_log_bytes,
                                   .high_watermark = o.high_watermark,
                                   .low_watermark = o.low_watermark,
                                   .seed = RandomNumber(),
                                   .first_lease = RandomNumber() >> 2}),
      checksummer(o.host_bytes > 0 ? ChecksumHelpers() : 0) {}

absl::StatusOr<std::unique_ptr<PageStore>> PageStore::Create(
    const std::vector<std::unique_ptr<Device>>& devices, const Options& options) {
  auto memory = TierMemory::Make(devices, options.host_bytes, options.device_bytes);
  if (!memory.ok()) return memory.status();
  return std::unique_ptr<PageStore>(new PageStore(std::make_unique<Impl>(*std::move(memory), options)));
}

PageStore::PageStore(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

PageStore::~PageStore() { Quiesce(); }

absl::StatusOr<NamespaceId> PageStore::Declare(std::uint64_t session, const NamespaceSpec& spec) {
  return impl_->Locked([&] { return impl_->catalog.Declare(session, spec); });
}

absl::StatusOr<std::shared_ptr<const BoundCache>> PageStore::Bind(std::uint64_t session,
                                                                  NamespaceId name_space, BoundCache cache) {
  const auto found = impl_->Locked([&] { return impl_->catalog.Find(session, name_space); });
  if (!found.ok()) return found.status();
  if (!impl_->memory->Has(cache.device)) {
    return Refuse(Reason::DEVICE_NOT_FOUND, "cache", "the store does not know the cache's device");
  }
  if (auto s = CheckBound((*found)->spec, cache); !s.ok()) return s;
  cache.name_space = name_space;
  return std::make_shared<const BoundCache>(std::move(cache));
}

absl::StatusOr<Hit> PageStore::Lookup(const LookupArgs& args) {
  return impl_->Locked([&] {
    auto hit = impl_->catalog.Lookup(args, impl_->options.now());
    impl_->QueueTouches();
    return hit;
  });
}

absl::StatusOr<std::chrono::milliseconds> PageStore::Renew(std::uint64_t session, LeaseId lease,
                                                           std::chrono::milliseconds time) {
  return impl_->Locked([&] { return impl_->catalog.Renew(session, lease, time, impl_->options.now()); });
}

void PageStore::Release(std::uint64_t session, LeaseId lease) {
  impl_->Locked([&] { return impl_->catalog.Release(session, lease); });
}

void PageStore::EndSession(std::uint64_t session) {
  impl_->Locked([&] { return impl_->catalog.EndSession(session); });
}

absl::StatusOr<EventBatch> PageStore::ReadEvents(std::uint64_t session, NamespaceId name_space,
                                                 std::uint64_t from, std::size_t max_events) {
  return impl_->Locked([&]() -> absl::StatusOr<EventBatch> {
    const auto found = impl_->catalog.Find(session, name_space);
    if (!found.ok()) return found.status();
    return (*found)->events.Read(from, max_events);
  });
}

absl::StatusOr<std::uint64_t> PageStore::Listen(std::uint64_t session, NamespaceId name_space,
                                                std::function<void()> listener) {
  const auto found = impl_->Locked([&] { return impl_->catalog.Find(session, name_space); });
  if (!found.ok()) return found.status();
  return impl_->listeners.Add(session, name_space, std::move(listener));
}

void PageStore::StopListening(std::uint64_t listener) { impl_->listeners.Remove(listener); }

std::vector<NamespaceUsage> PageStore::ListNamespaces() const {
  std::lock_guard lock(impl_->mutex);
  return impl_->catalog.ListNamespaces();
}

StoreStats PageStore::stats() const {
  return impl_->Locked([&] {
    impl_->catalog.ExpireLeases(impl_->options.now());
    return impl_->catalog.stats();
  });
}

std::vector<std::string> PageStore::Check() const {
  std::lock_guard lock(impl_->mutex);
  return impl_->catalog.Check();
}

void PageStore::Quiesce() {
  std::unique_lock lock(impl_->mutex);
  impl_->idle.wait(lock, [&] { return impl_->operations == 0; });
}

}  // namespace kvsummary
