// How a puller gets an offer's bytes: whether it may read the staging memory itself, or UCX brings them. One
// for each stream.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "kvsummary/v1/handoff.pb.h"
#include "server/rpc/context.h"
#include "server/rpc/source_pull.h"

namespace kvsummary {

class StagingLender {
 public:
  // `local`: the puller has come over a Unix socket, and may share memory.
  StagingLender(const ServiceContext& context, bool local) : context_(context), local_(local) {}
  // Ends the tickets that were not redeemed.
  ~StagingLender();
  StagingLender(const StagingLender&) = delete;
  StagingLender& operator=(const StagingLender&) = delete;

  void set_hello(const v1::PullHello& hello) { hello_ = hello; }
  // Chooses the best way that both sides can do, and says in pull.accepted where the bytes are.
  void Choose(const v1::PullBegin& begin, SourcePull& pull);

 private:
  bool LendMemory(const v1::PullBegin& begin, const Device& device, v1::MemoryHandle& handle);
  bool LendToUcx(SourcePull& pull, v1::PullAccepted& accepted);
  // For a descriptor that cannot be written through, nor opened anew for that: the memory is sealed.
  std::optional<std::string> IssueTicket(const Memory& memory);

  const ServiceContext context_;
  const bool local_;
  v1::PullHello hello_;
  std::shared_ptr<Session> session_;  // for tickets
  bool lent_ = false;                 // the stream has had a ticket
};

}  // namespace kvsummary
