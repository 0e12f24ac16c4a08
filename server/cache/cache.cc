#include "server/cache/cache.h"

#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/cache/geometry.h"
#include "server/error.h"

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

Cache::Cache(std::string name, std::uint64_t generation, CacheGeometry geometry, Device& device,
             Budget::Reservation reservation, std::unique_ptr<Memory> memory)
    : name_(std::move(name)),
      generation_(generation),
      geometry_(geometry),
      device_(device),
      reservation_(std::move(reservation)),
      memory_(std::move(memory)) {}

absl::Status Cache::Apply(LayerSpan layers, const Step& step) {
  if (auto s = device_.health(); !s.ok()) return s;
  return device_.Apply(MakeView(geometry_, memory_->data(), layers), step);
}

absl::Status Cache::CopyOut(std::span<const Piece> pieces, char* host) {
  if (auto s = device_.health(); !s.ok()) return s;
  return device_.CopyOut(*memory_, pieces, host);
}

absl::Status Cache::CopyIn(std::span<const Piece> pieces, const char* host) {
  if (auto s = device_.health(); !s.ok()) return s;
  return device_.CopyIn(*memory_, pieces, host);
}

void AppendPagePieces(const CacheGeometry& g, std::int64_t block, LayerSpan layers,
                      std::vector<Piece>& pieces) {
  pieces.push_back({g.page_offset(block, layers.first), layers.count * g.page_bytes()});
}

void AppendTailPieces(const CacheGeometry& g, std::int64_t ring_block, LayerSpan layers,
                      std::vector<Piece>& pieces) {
  const std::int64_t tail_bytes = std::int64_t{g.capacity} * kRowBytes;
  if (g.rows_per_layer == g.capacity) {
    pieces.push_back({g.ring_row_offset(ring_block, layers.first, 0), layers.count * tail_bytes});
    return;
  }
  for (std::int32_t i = 0; i < layers.count; ++i) {
    pieces.push_back({g.ring_row_offset(ring_block, layers.first + i, 0), tail_bytes});
  }
}

CacheManager::CacheManager(std::vector<std::unique_ptr<Device>> devices, std::uint64_t first_generation)
    : devices_(std::move(devices)),
      default_device_(devices_.front().get()),
      next_generation_(first_generation) {
  for (const auto& device : devices_) {
    if (device->name() != "host") {
      default_device_ = device.get();
      break;
    }
  }
}

CacheManager::~CacheManager() {
  caches_.clear();
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

void CacheManager::Create(const std::string& name, const std::string& device_name,
                          const CacheGeometry& wanted, absl::AnyInvocable<bool()> cancelled,
                          absl::AnyInvocable<void(CacheOr)> done) {
  if (auto s = CheckName(name); !s.ok()) return done(s);
  const auto device = FindDevice(device_name);
  if (!device.ok()) return done(device.status());
  const auto geometry = CheckGeometry(wanted);
  if (!geometry.ok()) return done(geometry.status());
  {
    std::lock_guard lock(mutex_);
    if (!caches_.emplace(name, nullptr).second) {
      return done(
          Refuse(Reason::CACHE_EXISTS, "name", absl::StrFormat("there is a cache \"%s\" already", name)));
    }
  }
  // `done` is shared because a refused Submit drops the closure that would have owned it.
  auto reply = std::make_shared<absl::AnyInvocable<void(CacheOr)>>(std::move(done));
  const auto queued = (*device)->executor().Submit(
      [this, name, device = *device, geometry = *geometry, cancelled = std::move(cancelled),
       reply]() mutable { (*reply)(MakeOnExecutor(name, *device, geometry, cancelled)); });
  if (!queued.ok()) {
    Forget(name);
    (*reply)(queued);
  }
}

CacheManager::CacheOr CacheManager::MakeOnExecutor(const std::string& name, Device& device,
                                                   const CacheGeometry& geometry,
                                                   absl::AnyInvocable<bool()>& cancelled) {
  const auto make = [&]() -> CacheOr {
    if (cancelled()) return absl::CancelledError("cancelled");
    if (auto s = device.Open(); !s.ok()) return s;
    auto reservation = device.budget().Reserve(geometry.total_bytes());
    if (!reservation.ok()) return reservation.status();
    auto memory = device.Allocate(geometry.total_bytes());
    if (!memory.ok()) return memory.status();
    if (cancelled()) return absl::CancelledError("cancelled");  // that may have taken a while
    const auto free_on_executor = [&device](Cache* cache) {
      device.executor().SubmitFree([owned = std::unique_ptr<Cache>(cache)] {});
    };
    std::lock_guard lock(mutex_);
    std::shared_ptr<Cache> cache(
        new Cache(name, next_generation_++, geometry, device, *std::move(reservation), *std::move(memory)),
        free_on_executor);
    caches_[name] = cache;
    return cache;
  };
  auto cache = make();
  if (!cache.ok()) Forget(name);
  return cache;
}

void CacheManager::Forget(const std::string& name) {
  std::lock_guard lock(mutex_);
  caches_.erase(name);
}

CacheManager::CacheOr CacheManager::Find(const std::string& name) const {
  std::lock_guard lock(mutex_);
  const auto it = caches_.find(name);
  if (it == caches_.end() || it->second == nullptr) return NotFound(name);
  return it->second;
}

CacheManager::CacheOr CacheManager::Find(const std::string& name, std::uint64_t generation) const {
  auto cache = Find(name);
  if (!cache.ok() || (*cache)->generation() == generation) return cache;
  return Refuse(
      Reason::GENERATION_STALE, "cache.generation",
      absl::StrFormat("cache \"%s\" has generation %d, not %d", name, (*cache)->generation(), generation));
}

std::vector<std::shared_ptr<Cache>> CacheManager::List() const {
  std::vector<std::shared_ptr<Cache>> caches;
  std::lock_guard lock(mutex_);
  for (const auto& [name, cache] : caches_) {
    if (cache != nullptr) caches.push_back(cache);
  }
  return caches;
}

void CacheManager::Delete(const std::string& name, std::uint64_t generation,
                          absl::AnyInvocable<void(absl::Status)> done) {
  auto cache = Find(name, generation);
  if (!cache.ok()) return done(cache.status());
  {
    std::lock_guard lock(mutex_);
    const auto it = caches_.find(name);
    if (it == caches_.end() || it->second != *cache) return done(NotFound(name));  // another Delete was first
    caches_.erase(it);
  }
  (*cache)->on_freed_.call = [done = std::move(done)]() mutable { done(absl::OkStatus()); };
}

}  // namespace kvsummary
