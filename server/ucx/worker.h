// UCX's context, worker and listener, for one thread. Active messages only: without UCP_FEATURE_RMA a peer's
// remote reads and writes of the protocol layer are refused.
#pragma once

#include <netinet/in.h>
#include <ucp/api/ucp.h>

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kvsummary {

// Says why on the standard error and ends the process: for what leaves no way to keep its promises.
[[noreturn]] void UcxFatal(const std::string& why);

class UcxWorker {
 public:
  // Listens on the first IPv4 address of the interface, on a port of the range in the environment variable
  // UCX_TCP_PORT_RANGE ("47000-47100") or of the kernel's choice.
  static absl::StatusOr<std::unique_ptr<UcxWorker>> Create(const std::string& net_device,
                                                           ucp_listener_conn_handler_t on_connect);
  // All endpoints have been closed.
  ~UcxWorker();

  absl::Status SetHandler(unsigned id, ucp_am_recv_callback_t callback, void* argument);

  // Does some of what there is to do; whether there was any.
  bool Progress() { return ucp_worker_progress(worker_) != 0; }
  // Whether event_fd() tells of everything from now on; else there is more to do.
  bool Arm();
  int event_fd() const { return event_fd_; }

  // Closes at once and waits for that: the callbacks of everything under way on it have been called. Not from
  // within a callback.
  void Close(ucp_ep_h endpoint);

  ucp_worker_h get() const { return worker_; }
  ucp_listener_h listener() const { return listener_; }
  const std::string& address() const { return address_; }

 private:
  UcxWorker() = default;
  absl::Status Open();
  absl::Status Listen(in_addr ip, ucp_listener_conn_handler_t on_connect);

  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  ucp_listener_h listener_ = nullptr;
  int event_fd_ = -1;  // the worker's
  std::string address_;
};

}  // namespace kvsummary
