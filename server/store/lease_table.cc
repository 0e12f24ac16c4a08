#include "server/store/lease_table.h"

namespace kvsummary {
namespace {

std::int64_t PagesIn(const Lease& lease) {
  std::size_t pages = 0;
  for (const Lease::Group& group : lease.groups) pages += group.entries.size();
  return static_cast<std::int64_t>(pages);
}

}  // namespace

Lease& LeaseTable::Add(std::unique_ptr<Lease> lease) {
  const std::uint64_t id = next_++;
  lease->id = LeaseId{id};
  deadlines_.emplace(lease->deadline, id);
  OfSession& session = sessions_[lease->session];
  session.ids.insert(id);
  session.pages += PagesIn(*lease);
  return *leases_.emplace(id, std::move(lease)).first->second;
}

Lease* LeaseTable::Find(std::uint64_t session, LeaseId id) {
  const auto found = leases_.find(static_cast<std::uint64_t>(id));
  return found != leases_.end() && found->second->session == session ? found->second.get() : nullptr;
}

void LeaseTable::SetDeadline(Lease& lease, Clock::time_point deadline) {
  const auto id = static_cast<std::uint64_t>(lease.id);
  deadlines_.erase({lease.deadline, id});
  lease.deadline = deadline;
  deadlines_.emplace(deadline, id);
}

std::unique_ptr<Lease> LeaseTable::Take(std::uint64_t id) {
  const auto found = leases_.find(id);
  std::unique_ptr<Lease> lease = std::move(found->second);
  leases_.erase(found);
  deadlines_.erase({lease->deadline, id});
  const auto session = sessions_.find(lease->session);
  session->second.ids.erase(id);
  session->second.pages -= PagesIn(*lease);
  if (session->second.ids.empty()) sessions_.erase(session);
  return lease;
}

std::unique_ptr<Lease> LeaseTable::Take(std::uint64_t session, LeaseId id) {
  return Find(session, id) != nullptr ? Take(static_cast<std::uint64_t>(id)) : nullptr;
}

std::unique_ptr<Lease> LeaseTable::TakeExpired(Clock::time_point now) {
  if (deadlines_.empty() || deadlines_.begin()->first > now) return nullptr;
  return Take(deadlines_.begin()->second);
}

std::unique_ptr<Lease> LeaseTable::TakeOf(std::uint64_t session) {
  const auto found = sessions_.find(session);
  return found != sessions_.end() ? Take(*found->second.ids.begin()) : nullptr;
}

std::size_t LeaseTable::CountOf(std::uint64_t session) const {
  const auto found = sessions_.find(session);
  return found != sessions_.end() ? found->second.ids.size() : 0;
}

std::int64_t LeaseTable::PagesOf(std::uint64_t session) const {
  const auto found = sessions_.find(session);
  return found != sessions_.end() ? found->second.pages : 0;
}

}  // namespace kvsummary
