// One call of HandoffService.Pull, the puller's end: writes requests one behind the other, and gives the link
// what comes.
#pragma once

#include <grpcpp/client_context.h>
#include <grpcpp/support/client_callback.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>

#include "kvsummary/v1/handoff.grpc.pb.h"

namespace kvsummary {

class PullLink;

// Deletes itself when the call is over and has told the link so: nothing of it is under way then. It may be
// used until the link has been told that it is broken.
class PullStream final : public grpc::ClientBidiReactor<v1::PullRequest, v1::PullResponse> {
 public:
  // Of a link, its number-th.
  PullStream(std::shared_ptr<PullLink> link, std::uint64_t number, v1::HandoffService::Stub& stub);

  std::uint64_t number() const { return number_; }
  // Begins the call; what has been given to Send before is written first.
  void Start() { StartCall(); }
  void Send(v1::PullRequest request);
  void Cancel() { context_.TryCancel(); }

 private:
  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnDone(const grpc::Status& status) override;

  const std::shared_ptr<PullLink> link_;
  const std::uint64_t number_;
  grpc::ClientContext context_;
  std::shared_ptr<v1::PullResponse> message_;  // being read
  bool heard_ = false;                         // of the source
  std::mutex mutex_;
  std::deque<v1::PullRequest> requests_;  // the first is being written
  bool broken_ = false;
};

}  // namespace kvsummary
