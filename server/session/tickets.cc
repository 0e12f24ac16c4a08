#include "server/session/tickets.h"

#include <utility>

#include "absl/strings/str_format.h"
#include "proto/descriptor_socket.h"
#include "server/error.h"
#include "server/session/random.h"

namespace kvsummary {

absl::StatusOr<std::string> Tickets::Issue(const std::shared_ptr<Session>& session, Purpose purpose) {
  auto ticket = RandomBytes(kTicketBytes);
  if (!ticket.ok()) return ticket;
  const std::uint64_t number = session->number();
  {
    std::lock_guard lock(mutex_);
    std::size_t& count = counts_[number];
    if (count >= kMaxSessionTickets) {
      return Refuse(Reason::SESSION_LIMIT, "session_id",
                    absl::StrFormat("the session has %d tickets that are not redeemed already", count));
    }
    ++count;
    entries_.emplace(*ticket, Entry{number, std::move(purpose)});
  }
  session->OnEnd(this, [this, number] { EndSession(number); });
  if (session->ended()) return Refuse(Reason::SESSION_ENDED, "session_id", "the session has ended");
  return ticket;
}

absl::StatusOr<DescriptorAnswer> Tickets::Redeem(const std::string& ticket, Descriptor descriptor) {
  Purpose purpose;
  {
    std::lock_guard lock(mutex_);
    const auto it = entries_.find(ticket);
    if (it == entries_.end()) {
      return Refuse(Reason::TICKET_UNKNOWN, "ticket",
                    "the ticket was never given out, has been redeemed, or ended with its session");
    }
    purpose = std::move(it->second.purpose);
    const auto count = counts_.find(it->second.session_number);
    if (--count->second == 0) counts_.erase(count);
    entries_.erase(it);
  }
  return purpose(std::move(descriptor));
}

std::int64_t Tickets::Count(std::uint64_t session_number) const {
  std::lock_guard lock(mutex_);
  const auto it = counts_.find(session_number);
  return it == counts_.end() ? 0 : static_cast<std::int64_t>(it->second);
}

void Tickets::EndSession(std::uint64_t session_number) {
  std::map<std::string, Entry> dropped;  // freed without the lock
  std::lock_guard lock(mutex_);
  counts_.erase(session_number);
  for (auto it = entries_.begin(); it != entries_.end();) {
    const auto next = std::next(it);
    if (it->second.session_number == session_number) dropped.insert(entries_.extract(it));
    it = next;
  }
}

}  // namespace kvsummary
