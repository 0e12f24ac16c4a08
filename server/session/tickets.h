// One-time tickets: what a gRPC call answers and its client redeems on the descriptor socket.
//
// A ticket is 32 random bytes, belongs to a session and is gone once it has been redeemed (whatever came of
// that) or its session has ended. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "absl/status/statusor.h"
#include "server/memory/descriptor.h"
#include "server/memory/descriptor_server.h"
#include "server/session/session.h"

namespace kvsummary {

inline constexpr std::size_t kMaxSessionTickets = 256;

class Tickets {
 public:
  // What redeeming does with the descriptor that came with the ticket. Called with no lock held.
  using Purpose = std::function<absl::StatusOr<DescriptorAnswer>(Descriptor)>;

  Tickets() = default;
  Tickets(const Tickets&) = delete;
  Tickets& operator=(const Tickets&) = delete;

  // SESSION_LIMIT beyond the limit of a session, SESSION_ENDED after its end. Must outlive the session.
  absl::StatusOr<std::string> Issue(const std::shared_ptr<Session>& session, Purpose purpose);

  // TICKET_UNKNOWN, or what the ticket's purpose answers.
  absl::StatusOr<DescriptorAnswer> Redeem(const std::string& ticket, Descriptor descriptor);

  // Not yet redeemed, of the session of this number.
  std::int64_t Count(std::uint64_t session_number) const;

 private:
  struct Entry {
    std::uint64_t session_number;
    Purpose purpose;
  };
  void EndSession(std::uint64_t session_number);

  mutable std::mutex mutex_;
  std::map<std::string, Entry> entries_;
  std::map<std::uint64_t, std::size_t> counts_;  // by session, none of 0
};

}  // namespace kvsummary
