#include "server/rpc/staging_lender.h"

#include <fcntl.h>

#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/rpc/handoff_wire.h"

namespace kvsummary {

StagingLender::~StagingLender() {
  if (session_ != nullptr) context_.sessions.End(session_);
}

void StagingLender::Choose(const v1::PullBegin& begin, SourcePull& pull) {
  v1::PullAccepted& accepted = pull.accepted;
  const std::set<int> can(begin.transports().begin(), begin.transports().end());
  if (can.contains(v1::HANDOFF_TRANSPORT_SAME_HOST) &&
      LendMemory(begin, pull.offer().device(), *accepted.mutable_memory())) {
    pull.transport = v1::HANDOFF_TRANSPORT_SAME_HOST;
    accepted.set_descriptor_socket(context_.descriptor_socket);
  } else {
    accepted.clear_memory();
    if (can.contains(v1::HANDOFF_TRANSPORT_UCX) && LendToUcx(pull, accepted)) {
      pull.transport = v1::HANDOFF_TRANSPORT_UCX;
    }
  }
  accepted.set_transport(pull.transport);
}

bool StagingLender::LendToUcx(SourcePull& pull, v1::PullAccepted& accepted) {
  if (context_.ucx == nullptr || hello_.ucx_version().empty() ||
      hello_.ucx_version() != context_.ucx->version()) {
    return false;
  }
  const Memory* memory = context_.offers.arena(pull.offer().device())->memory();
  if (memory != nullptr) pull.loan = context_.ucx->Borrow(*memory);
  if (pull.loan == nullptr) return false;
  accepted.set_ucx_address(pull.loan->address());
  accepted.set_ucx_token(pull.loan->token());
  accepted.set_ucx_staging(pull.loan->staging());
  return true;
}

bool StagingLender::LendMemory(const v1::PullBegin& begin, const Device& device, v1::MemoryHandle& handle) {
  if (!local_ || !context_.handoff.shares_memory || hello_.boot_id().empty() ||
      hello_.boot_id() != BootId()) {
    return false;
  }
  const Memory* memory = context_.offers.arena(device)->memory();
  if (memory == nullptr) return false;
  handle.set_kind(static_cast<v1::MemoryKind>(memory->kind()));
  handle.set_size_bytes(memory->bytes());
  handle.set_device_uuid(device.uuid());
  handle.set_generation(context_.handoff.generation());
  if (!memory->ipc_handle().empty()) {
    handle.set_handle(memory->ipc_handle());
    return !begin.device_uuid().empty();
  }
  if (memory->kind() != MemoryKind::kMemfd || context_.descriptor_socket.empty()) return false;
  if (lent_) return true;
  auto ticket = IssueTicket(*memory);
  if (!ticket) return false;
  handle.set_handle(*std::move(ticket));
  lent_ = true;
  return true;
}

std::optional<std::string> StagingLender::IssueTicket(const Memory& memory) {
  if (session_ == nullptr) {
    auto session = context_.sessions.Open("handoff-peer");
    if (!session.ok()) return std::nullopt;
    session_ = *std::move(session);
  }
  auto ticket = context_.tickets.Issue(
      session_,
      [fd = memory.descriptor(),
       bytes = memory.bytes()](const Descriptor&) -> absl::StatusOr<DescriptorAnswer> {
        Descriptor read_only(open(absl::StrCat("/proc/self/fd/", fd).c_str(), O_RDONLY | O_CLOEXEC));
        if (read_only.get() < 0) return absl::InternalError("the staging memory cannot be opened");
        return DescriptorAnswer{.descriptor = std::move(read_only), .size_bytes = bytes};
      });
  if (!ticket.ok()) return std::nullopt;
  return *std::move(ticket);
}

}  // namespace kvsummary
