#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/cache/cache.h"
#include "server/cache/geometry.h"
#include "server/error.h"
#include "server/name.h"

namespace kvsummary {
namespace {

// A name from a request, unchecked: of any length, with any bytes. A status must fit the call's trailers.
std::string Quoted(const std::string& name) {
  const std::string escaped = absl::CHexEscape(name.substr(0, kMaxNameBytes));
  return absl::StrCat("\"", escaped, name.size() > kMaxNameBytes ? "...\"" : "\"");
}

absl::Status NotFound(const std::string& name) {
  return Refuse(Reason::CACHE_NOT_FOUND, "cache.name", absl::StrCat("there is no cache ", Quoted(name)));
}

}  // namespace

CacheManager::CacheManager(std::vector<std::unique_ptr<Device>> devices, std::uint64_t first_generation,
                           Options options)
    : devices_(std::move(devices)),
      options_(std::move(options)),
      default_device_(devices_.front().get()),
      next_generation_(first_generation) {
  for (const auto& device : devices_) {
    if (device->name() != "host") {
      default_device_ = device.get();
      break;
    }
  }
}

CacheManager::CacheManager(std::vector<std::unique_ptr<Device>> devices, std::uint64_t first_generation)
    : CacheManager(std::move(devices), first_generation, Options()) {}

CacheManager::~CacheManager() {
  {
    std::lock_guard lock(mutex_);
    caches_.clear();
    mappings_.Clear();
  }
  for (const auto& device : devices_) device->executor().Stop();
}

absl::StatusOr<Device*> CacheManager::FindDevice(const std::string& name) const {
  if (name.empty()) return default_device_;
  for (const auto& device : devices_) {
    if (device->name() == name) return device.get();
  }
  std::string known;
  for (const auto& device : devices_) known += (known.empty() ? "" : ", ") + device->name();
  return Refuse(Reason::DEVICE_NOT_FOUND, "device",
                absl::StrFormat("there is no device %s here; there are: %s", Quoted(name), known));
}

void CacheManager::Create(Wanted wanted, absl::AnyInvocable<bool()> cancelled,
                          absl::AnyInvocable<void(CacheOr)> done) {
  if (auto s = CheckName(wanted.name); !s.ok()) return done(s);
  const auto device = FindDevice(wanted.device);
  if (!device.ok()) return done(device.status());
  const auto geometry = CheckGeometry(wanted.geometry);
  if (!geometry.ok()) return done(geometry.status());
  wanted.geometry = *geometry;
  const std::string name = wanted.name;
  {
    std::lock_guard lock(mutex_);
    if (!caches_.emplace(name, Entry{}).second) {
      return done(
          Refuse(Reason::CACHE_EXISTS, "name", absl::StrFormat("there is a cache \"%s\" already", name)));
    }
  }
  // `done` is shared because a refused Submit drops the closure that would have owned it.
  auto reply = std::make_shared<absl::AnyInvocable<void(CacheOr)>>(std::move(done));
  const auto queued = (*device)->executor().Submit(
      [this, wanted = std::move(wanted), device = *device, cancelled = std::move(cancelled),
       reply]() mutable { (*reply)(MakeOnExecutor(wanted, *device, cancelled)); });
  if (!queued.ok()) {
    Forget(name);
    (*reply)(queued);
  }
}

CacheManager::CacheOr CacheManager::MakeOnExecutor(const Wanted& wanted, Device& device,
                                                   absl::AnyInvocable<bool()>& cancelled) {
  const auto make = [&]() -> CacheOr {
    if (cancelled()) return absl::CancelledError("cancelled");
    if (auto s = device.Open(); !s.ok()) return s;
    const auto bytes = device.AllocationBytes(wanted.geometry.total_bytes(), wanted.kind);
    if (!bytes.ok()) return bytes.status();
    auto reservation = device.budget().Reserve(*bytes);
    if (!reservation.ok()) return reservation.status();
    auto memory = device.Allocate(*bytes, wanted.kind);
    if (!memory.ok()) return memory.status();
    if (cancelled()) return absl::CancelledError("cancelled");  // that may have taken a while
    std::lock_guard lock(mutex_);
    auto cache = std::make_shared<Cache>(wanted.name, next_generation_++, wanted.geometry, device,
                                         Segment::Make(device, *std::move(reservation), *std::move(memory)),
                                         wanted.session);
    caches_[wanted.name].cache = cache;
    return cache;
  };
  auto cache = make();
  if (!cache.ok()) Forget(wanted.name);
  return cache;
}

void CacheManager::Attach(const std::string& name, std::uint64_t session,
                          absl::AnyInvocable<void(CacheOr)> done) {
  auto cache = [&] {
    std::lock_guard lock(mutex_);
    return AttachLocked(name, session);
  }();
  if (!cache.ok()) return done(std::move(cache));
  Executor& executor = (*cache)->device().executor();
  executor.SubmitFree(
      [cache = *std::move(cache), done = std::move(done)]() mutable { done(std::move(cache)); });
}

CacheManager::CacheOr CacheManager::AttachLocked(const std::string& name, std::uint64_t session) {
  auto found = FindLocked(name);
  if (!found.ok()) return found;
  Cache& old = **found;
  if (old.attached()) {
    return Refuse(Reason::CACHE_IN_USE, "name",
                  absl::StrFormat("cache \"%s\" belongs to %s", name,
                                  old.session() == 0 ? "the operator" : "a session that lives"));
  }
  mappings_.Collect();
  if (mappings_.IsMapped(*old.segment_)) {
    return Refuse(Reason::CACHE_STILL_MAPPED, "name",
                  absl::StrFormat("a process that mapped cache \"%s\" lives and has not released it", name));
  }
  auto cache =
      std::make_shared<Cache>(name, next_generation_++, old.geometry(), old.device(), old.segment_, session);
  old.superseded_ = true;
  caches_[name] = Entry{.cache = cache};
  return cache;
}

void CacheManager::EndSession(std::uint64_t session) {
  std::lock_guard lock(mutex_);
  mappings_.EndSession(session);
  for (auto& [name, entry] : caches_) {
    if (entry.cache == nullptr || entry.cache->session() != session || !entry.cache->attached()) continue;
    entry.cache->attached_ = false;
    entry.expires = options_.now() + options_.grace;
  }
  mappings_.Wake();
}

void CacheManager::Forget(const std::string& name) {
  std::lock_guard lock(mutex_);
  caches_.erase(name);
}

CacheManager::CacheOr CacheManager::FindLocked(const std::string& name) const {
  const auto it = caches_.find(name);
  if (it == caches_.end() || it->second.cache == nullptr) return NotFound(name);
  return it->second.cache;
}

CacheManager::CacheOr CacheManager::FindLocked(const std::string& name, std::uint64_t generation) const {
  auto cache = FindLocked(name);
  if (!cache.ok() || (*cache)->generation() == generation) return cache;
  return Refuse(
      Reason::GENERATION_STALE, "cache.generation",
      absl::StrFormat("cache \"%s\" has generation %d, not %d", name, (*cache)->generation(), generation));
}

CacheManager::CacheOr CacheManager::FindMappableLocked(const std::string& name, std::uint64_t generation,
                                                       std::uint64_t session) const {
  auto cache = FindLocked(name, generation);
  if (!cache.ok()) return cache;
  const Cache& c = **cache;
  if (c.session() == 0 || (c.session() == session && c.attached())) return cache;
  return Refuse(Reason::CACHE_NOT_YOURS, "cache.name",
                absl::StrFormat("cache \"%s\" belongs to %s", name,
                                c.attached() ? "another session" : "no session: attach it first"));
}

CacheManager::CacheOr CacheManager::Find(const std::string& name) const {
  std::lock_guard lock(mutex_);
  return FindLocked(name);
}

CacheManager::CacheOr CacheManager::Find(const std::string& name, std::uint64_t generation) const {
  std::lock_guard lock(mutex_);
  return FindLocked(name, generation);
}

CacheManager::CacheOr CacheManager::FindMappable(const std::string& name, std::uint64_t generation,
                                                 std::uint64_t session) const {
  std::lock_guard lock(mutex_);
  return FindMappableLocked(name, generation, session);
}

std::vector<std::shared_ptr<Cache>> CacheManager::List() const {
  std::vector<std::shared_ptr<Cache>> caches;
  std::lock_guard lock(mutex_);
  for (const auto& [name, entry] : caches_) {
    if (entry.cache != nullptr) caches.push_back(entry.cache);
  }
  return caches;
}

void CacheManager::Delete(const std::string& name, std::uint64_t generation,
                          absl::AnyInvocable<void(absl::Status)> done) {
  std::shared_ptr<Cache> cache;
  LostListener on_lost;
  {
    std::unique_lock lock(mutex_);
    auto found = FindLocked(name, generation);
    if (!found.ok()) {
      lock.unlock();
      return done(found.status());
    }
    cache = *std::move(found);
    caches_.erase(name);
    if (cache->session() != 0 && cache->attached()) on_lost = on_lost_;
  }
  if (on_lost) on_lost(cache->session(), name, generation);
  // By the time it is called the freeing of the memory is queued, unless somebody has it mapped.
  cache->on_dropped_.call = [&executor = cache->device().executor(), done = std::move(done)]() mutable {
    executor.SubmitFree([done = std::move(done)]() mutable { done(absl::OkStatus()); });
  };
  cache->TellDeleted();
}

absl::StatusOr<CacheManager::Mapped> CacheManager::MapMemory(const std::string& name,
                                                             std::uint64_t generation, std::uint64_t session,
                                                             Descriptor pidfd) {
  std::lock_guard lock(mutex_);
  const auto cache = FindMappableLocked(name, generation, session);
  if (!cache.ok()) return cache.status();
  const Memory& memory = (*cache)->memory();
  Mapped mapped;
  mapped.ipc_handle = memory.ipc_handle();
  mapped.bytes = memory.bytes();
  if (memory.descriptor() >= 0) {
    mapped.descriptor = Descriptor(fcntl(memory.descriptor(), F_DUPFD_CLOEXEC, 0));
    if (!mapped.descriptor) {
      return absl::ResourceExhaustedError(absl::StrFormat("no descriptor is left: %s", std::strerror(errno)));
    }
  }
  if (auto s = mappings_.Add({session, name, generation, (*cache)->segment_, std::move(pidfd)}); !s.ok())
    return s;
  return mapped;
}

void CacheManager::ReleaseMemory(const std::string& name, std::uint64_t generation, std::uint64_t session) {
  std::lock_guard lock(mutex_);
  mappings_.Release(session, name, generation);
}

std::vector<std::string> CacheManager::MappedBy(std::uint64_t session) const {
  std::lock_guard lock(mutex_);
  return mappings_.CachesOf(session);
}

bool CacheManager::IsOwnIpcHandle(const std::string& handle) const {
  const auto caches = List();
  return !handle.empty() && std::any_of(caches.begin(), caches.end(), [&](const auto& cache) {
    return cache->memory().ipc_handle() == handle;
  });
}

void CacheManager::set_on_lost(LostListener listener) {
  std::lock_guard lock(mutex_);
  on_lost_ = std::move(listener);
}

std::optional<CacheManager::Clock::duration> CacheManager::Reap() {
  const auto now = options_.now();
  auto next = Clock::time_point::max();
  std::lock_guard lock(mutex_);
  mappings_.Collect();
  for (auto it = caches_.begin(); it != caches_.end();) {
    if (it->second.expires <= now) {
      it = caches_.erase(it);  // its memory is freed on the executor
    } else {
      next = std::min(next, it->second.expires);
      ++it;
    }
  }
  if (next == Clock::time_point::max()) return std::nullopt;
  return next - now;
}

}  // namespace kvsummary
