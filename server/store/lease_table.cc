#include "server/store/lease_table.h"

namespace kvsummary {

Lease& LeaseTable::Add(std::unique_ptr<Lease> lease) {
  const std::uint64_t id = next_++;
  lease->id = LeaseId{id};
  deadlines_.emplace(lease->deadline, id);
  sessions_[lease->session].insert(id);
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
  session->second.erase(id);
  if (session->second.empty()) sessions_.erase(session);
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
  return found != sessions_.end() ? Take(*found->second.begin()) : nullptr;
}

std::size_t LeaseTable::CountOf(std::uint64_t session) const {
  const auto found = sessions_.find(session);
  return found != sessions_.end() ? found->second.size() : 0;
}

}  // namespace kvsummary
