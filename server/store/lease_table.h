// Leases: which pages a session's hit holds, and until when. What a lease pins is the catalog's to count;
// this table says whose leases there are and which have run out. Not thread-safe.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "server/store/page_table.h"
#include "server/store/types.h"

namespace kvsummary {

struct Lease {
  using Clock = std::chrono::steady_clock;

  struct Group {
    std::int64_t first_block_index = 0;
    std::vector<Entry> entries;  // of consecutive blocks; none of a RING group
  };

  LeaseId id{};
  std::uint64_t session = 0;
  NamespaceId name_space{};
  Clock::time_point deadline;
  std::vector<Group> groups;  // as the namespace has
  std::vector<Entry> pinned;  // the last page of every unbroken part of a prefix, and every page of a window
};

class LeaseTable {
 public:
  using Clock = Lease::Clock;

  // `first`: of the ids, which count up from it.
  explicit LeaseTable(std::uint64_t first) : next_(first) {}

  // Gives the lease an id.
  Lease& Add(std::unique_ptr<Lease> lease);
  // Null when the session has no such lease.
  Lease* Find(std::uint64_t session, LeaseId id);
  void SetDeadline(Lease& lease, Clock::time_point deadline);
  // Takes it out of the table, for the caller to unpin what it pins; null when there is none.
  std::unique_ptr<Lease> Take(std::uint64_t session, LeaseId id);
  // Takes one whose deadline has come, and one of a session.
  std::unique_ptr<Lease> TakeExpired(Clock::time_point now);
  std::unique_ptr<Lease> TakeOf(std::uint64_t session);

  std::size_t size() const { return leases_.size(); }
  std::size_t CountOf(std::uint64_t session) const;
  // Pages that the session's leases are of, each counted once a lease.
  std::int64_t PagesOf(std::uint64_t session) const;
  template <typename Visit>
  void ForEach(Visit visit) const {
    for (const auto& [id, lease] : leases_) visit(*lease);
  }

 private:
  struct OfSession {
    std::set<std::uint64_t> ids;
    std::int64_t pages = 0;
  };

  std::unique_ptr<Lease> Take(std::uint64_t id);

  std::uint64_t next_;
  absl::flat_hash_map<std::uint64_t, std::unique_ptr<Lease>> leases_;
  std::set<std::pair<Clock::time_point, std::uint64_t>> deadlines_;
  std::map<std::uint64_t, OfSession> sessions_;
};

}  // namespace kvsummary
