// The helper's end of the socketpair to the daemon (protocol.h). It never blocks: what the socket has no room
// for is kept.
#pragma once

#include <deque>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "server/memory/descriptor.h"
#include "server/ucx/protocol.h"

namespace kvsummary {

class UcxControl {
 public:
  struct Received {
    UcxCommand command;
    Descriptor descriptor;  // that came with it
  };

  // Takes over the descriptor.
  explicit UcxControl(int fd) : socket_(fd) {}

  // The next command; nothing when there is none now, or never again: then closed().
  std::optional<Received> Receive();
  bool closed() const { return closed_; }

  void Say(UcxEventKind kind, const std::string& text) { Send(kind, 0, absl::StatusCode::kOk, text); }
  void Refuse(const absl::Status& why);
  void Answer(std::uint64_t id, const absl::Status& status);
  void SendUnsent();

  int fd() const { return socket_.get(); }
  bool has_unsent() const { return !unsent_.empty(); }

 private:
  void Send(UcxEventKind kind, std::uint64_t id, absl::StatusCode code, const std::string& text);
  // False: there is no room.
  bool SendOne(const UcxEvent& event);

  Descriptor socket_;
  bool closed_ = false;
  std::deque<UcxEvent> unsent_;
};

}  // namespace kvsummary
