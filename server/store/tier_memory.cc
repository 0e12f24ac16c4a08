#include "server/store/tier_memory.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "absl/strings/str_format.h"
#include "server/error.h"

namespace kvsummary {
namespace {

constexpr std::string_view kHost = "host";
// Units are block ids of kernels/copy.h, unit 0 among them.
constexpr std::int64_t kMaxTierBytes = (kMaxIndex - 1) * kPageUnit;

// The views of a page in a tier: its parts one after the other.
std::vector<PageView> Packed(const std::vector<PageView>& views) {
  std::vector<PageView> packed;
  packed.reserve(views.size());
  std::int64_t offset = 0;
  for (const PageView& view : views) {
    packed.push_back({offset, kPageUnit, view.bytes});
    offset += view.bytes;
  }
  return packed;
}

PageSet SetOfCache(const BoundCache& cache, int group, std::int64_t page_bytes) {
  const BoundCache::Group& g = cache.groups[static_cast<std::size_t>(group)];
  return {g.base, cache.blocks, g.views.data(), static_cast<std::int32_t>(g.views.size()), page_bytes};
}

std::int64_t SumOfBytes(const std::vector<PageView>& views) {
  std::int64_t bytes = 0;
  for (const PageView& view : views) bytes += view.bytes;
  return bytes;
}

}  // namespace

absl::StatusOr<std::unique_ptr<TierMemory>> TierMemory::Make(
    const std::vector<std::unique_ptr<Device>>& devices, std::int64_t host_bytes, std::int64_t device_bytes) {
  if (const std::int64_t largest = std::max(host_bytes, device_bytes); largest > kMaxTierBytes) {
    return Refuse(Reason::COUNT_OUT_OF_RANGE, host_bytes == largest ? "host_bytes" : "device_bytes",
                  absl::StrFormat("a tier of %d bytes; it has at most %d", largest, kMaxTierBytes));
  }
  std::unique_ptr<TierMemory> made(new TierMemory());
  const bool only_host = devices.size() == 1;
  for (const auto& device : devices) {
    if (device->name() == kHost) made->tiers_.push_back({device.get(), host_bytes});
  }
  for (const auto& device : devices) {
    User& user = made->users_.emplace_back();
    user.device = device.get();
    if (device_bytes == 0 || (device->name() == kHost && !only_host)) continue;
    user.tier = made->tiers_.size();
    made->tiers_.push_back({device.get(), device_bytes});
  }
  if (auto s = Take(made->tiers_[0]); !s.ok()) return s;
  return made;
}

TierMemory::~TierMemory() {
  users_.clear();  // what is pinned, before it is freed
  for (std::size_t t = 1; t < tiers_.size(); ++t) {
    Device& device = *tiers_[t].device;
    device.executor().SubmitFree([tier = std::move(tiers_[t])] {});
  }
}

bool TierMemory::Has(const Device* device) const {
  return std::any_of(users_.begin(), users_.end(), [&](const User& user) { return user.device == device; });
}

absl::Status TierMemory::Take(Tier& tier) {
  if (tier.capacity_bytes == 0 || tier.memory != nullptr) return absl::OkStatus();
  // Unit 0 is never used.
  const auto bytes = tier.device->AllocationBytes(tier.capacity_bytes + kPageUnit, MemoryKind::kDefault);
  if (!bytes.ok()) return bytes.status();
  auto reservation = tier.device->budget().Reserve(*bytes);
  if (!reservation.ok()) return AtField(reservation.status(), "");
  auto memory = tier.device->Allocate(*bytes, MemoryKind::kDefault);
  if (!memory.ok()) return AtField(memory.status(), "");
  tier.reservation = *std::move(reservation);
  tier.memory = *std::move(memory);
  tier.base = static_cast<char*>(tier.memory->data());
  return absl::OkStatus();
}

absl::Status TierMemory::Prepare(Device& device) {
  User& user =
      *std::find_if(users_.begin(), users_.end(), [&](const User& u) { return u.device == &device; });
  if (user.ready) return device.health();
  if (auto s = device.Open(); !s.ok()) return s;
  if (user.tier != 0) {
    if (auto s = Take(tiers_[user.tier]); !s.ok()) return s;
  }
  if (const Memory* host = tiers_[0].memory.get(); host != nullptr) {
    auto pinned = device.MapHost(host->data(), host->bytes());
    if (!pinned.ok()) return pinned.status();
    user.pinned_host = *std::move(pinned);
  }
  user.ready = true;
  return absl::OkStatus();
}

PageSet TierMemory::SetOf(std::size_t tier, std::int64_t page_bytes,
                          const std::vector<PageView>& views) const {
  return {reinterpret_cast<std::uint8_t*>(tiers_[tier].base), tiers_[tier].capacity_bytes / kPageUnit + 1,
          views.data(), static_cast<std::int32_t>(views.size()), page_bytes};
}

TierMemory::Moved TierMemory::FromCache(const BoundCache& cache, int group, Ids blocks, std::size_t tier,
                                        Ids units) const {
  const std::vector<PageView>& views = cache.groups[static_cast<std::size_t>(group)].views;
  const std::vector<PageView> packed = Packed(views);
  const std::int64_t bytes = SumOfBytes(views);
  return cache.device->MovePages(SetOfCache(cache, group, bytes), blocks, SetOf(tier, bytes, packed), units);
}

TierMemory::Moved TierMemory::ToCache(std::size_t tier, Ids units, const BoundCache& cache, int group,
                                      Ids blocks) const {
  const std::vector<PageView>& views = cache.groups[static_cast<std::size_t>(group)].views;
  const std::vector<PageView> packed = Packed(views);
  const std::int64_t bytes = SumOfBytes(views);
  return cache.device->MovePages(SetOf(tier, bytes, packed), units, SetOfCache(cache, group, bytes), blocks);
}

TierMemory::Moved TierMemory::Between(Device& device, std::int64_t page_bytes, std::size_t from,
                                      Ids from_units, std::size_t to, Ids to_units) const {
  const std::vector<PageView> views = {{0, kPageUnit, page_bytes}};
  return device.MovePages(SetOf(from, page_bytes, views), from_units, SetOf(to, page_bytes, views), to_units);
}

}  // namespace kvsummary
