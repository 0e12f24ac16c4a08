#include "server/ucx/worker.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <ucs/debug/log_def.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "absl/strings/str_format.h"

namespace kvsummary {
namespace {

struct Ports {
  int first = 0;
  int last = 0;  // 0 to 0: of the kernel's choice
};

ucs_log_func_rc_t Log(const char* file, unsigned line, const char* /*function*/, ucs_log_level_t level,
                      const ucs_log_component_config_t* /*component*/, const char* format,
                      va_list arguments) {
  char text[1024];
  std::vsnprintf(text, sizeof(text), format, arguments);
  const char* slash = std::strrchr(file, '/');
  std::fprintf(stderr, "summaryd-ucx: level %d, %s:%u: %s\n", static_cast<int>(level),
               slash != nullptr ? slash + 1 : file, line, text);
  return UCS_LOG_FUNC_RC_STOP;
}

absl::Status Failed(const char* call, ucs_status_t status) {
  return absl::UnavailableError(absl::StrFormat("%s: %s", call, ucs_status_string(status)));
}

absl::StatusOr<in_addr> AddressOf(const std::string& net_device) {
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) return absl::InternalError("getifaddrs failed");
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(all, &freeifaddrs);
  for (const ifaddrs* i = all; i != nullptr; i = i->ifa_next) {
    if (net_device != i->ifa_name || i->ifa_addr == nullptr || i->ifa_addr->sa_family != AF_INET) continue;
    return reinterpret_cast<const sockaddr_in*>(i->ifa_addr)->sin_addr;
  }
  return absl::NotFoundError(absl::StrFormat("there is no interface '%s' with an IPv4 address", net_device));
}

absl::StatusOr<Ports> PortsOfEnvironment() {
  const char* text = std::getenv("UCX_TCP_PORT_RANGE");
  Ports ports;
  if (text == nullptr || std::strcmp(text, "0") == 0) return ports;
  char rest = 0;
  if (std::sscanf(text, "%d-%d%c", &ports.first, &ports.last, &rest) != 2 || ports.first < 1 ||
      ports.last > 65535 || ports.first > ports.last) {
    return absl::InvalidArgumentError(absl::StrFormat("UCX_TCP_PORT_RANGE=%s is not FIRST-LAST", text));
  }
  return ports;
}

}  // namespace

void UcxFatal(const std::string& why) {
  std::fprintf(stderr, "summaryd-ucx: fatal: %s\n", why.c_str());
  _exit(3);
}

absl::StatusOr<std::unique_ptr<UcxWorker>> UcxWorker::Create(const std::string& net_device,
                                                             ucp_listener_conn_handler_t on_connect) {
  const auto ip = AddressOf(net_device);
  if (!ip.ok()) return ip.status();
  ucs_log_push_handler(Log);
  std::unique_ptr<UcxWorker> worker(new UcxWorker);
  if (absl::Status open = worker->Open(); !open.ok()) return open;
  if (absl::Status listen = worker->Listen(*ip, on_connect); !listen.ok()) return listen;
  return worker;
}

absl::Status UcxWorker::Open() {
  ucp_params_t parameters{};
  parameters.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_NAME;
  parameters.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  parameters.name = "summaryd";
  if (ucs_status_t s = ucp_init(&parameters, nullptr, &context_); s != UCS_OK) return Failed("ucp_init", s);
  ucp_worker_params_t worker{};
  worker.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  worker.thread_mode = UCS_THREAD_MODE_SINGLE;
  if (ucs_status_t s = ucp_worker_create(context_, &worker, &worker_); s != UCS_OK) {
    return Failed("ucp_worker_create", s);
  }
  if (ucs_status_t s = ucp_worker_get_efd(worker_, &event_fd_); s != UCS_OK) {
    return Failed("ucp_worker_get_efd", s);
  }
  return absl::OkStatus();
}

absl::Status UcxWorker::Listen(in_addr ip, ucp_listener_conn_handler_t on_connect) {
  const auto ports = PortsOfEnvironment();
  if (!ports.ok()) return ports.status();
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr = ip;
  ucs_status_t status = UCS_ERR_BUSY;
  for (int port = ports->first; status == UCS_ERR_BUSY && port <= ports->last; ++port) {
    address.sin_port = htons(static_cast<std::uint16_t>(port));
    ucp_listener_params_t parameters{};
    parameters.field_mask = UCP_LISTENER_PARAM_FIELD_SOCK_ADDR | UCP_LISTENER_PARAM_FIELD_CONN_HANDLER;
    parameters.sockaddr = {reinterpret_cast<const sockaddr*>(&address), sizeof(address)};
    parameters.conn_handler = on_connect;
    status = ucp_listener_create(worker_, &parameters, &listener_);
  }
  if (status != UCS_OK) return Failed("ucp_listener_create", status);
  ucp_listener_attr_t attributes{};
  attributes.field_mask = UCP_LISTENER_ATTR_FIELD_SOCKADDR;
  if (ucs_status_t s = ucp_listener_query(listener_, &attributes); s != UCS_OK) {
    return Failed("ucp_listener_query", s);
  }
  const auto& bound = reinterpret_cast<const sockaddr_in&>(attributes.sockaddr);
  char text[INET_ADDRSTRLEN];
  inet_ntop(AF_INET, &bound.sin_addr, text, sizeof(text));
  address_ = absl::StrFormat("%s:%d", text, ntohs(bound.sin_port));
  return absl::OkStatus();
}

UcxWorker::~UcxWorker() {
  if (listener_ != nullptr) ucp_listener_destroy(listener_);
  if (worker_ != nullptr) ucp_worker_destroy(worker_);
  if (context_ != nullptr) ucp_cleanup(context_);
}

absl::Status UcxWorker::SetHandler(unsigned id, ucp_am_recv_callback_t callback, void* argument) {
  ucp_am_handler_param_t handler{};
  handler.field_mask =
      UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
  handler.id = id;
  handler.cb = callback;
  handler.arg = argument;
  const ucs_status_t s = ucp_worker_set_am_recv_handler(worker_, &handler);
  return s == UCS_OK ? absl::OkStatus() : Failed("ucp_worker_set_am_recv_handler", s);
}

bool UcxWorker::Arm() {
  const ucs_status_t s = ucp_worker_arm(worker_);
  if (s != UCS_OK && s != UCS_ERR_BUSY) UcxFatal(absl::StrFormat("ucp_worker_arm: %s", ucs_status_string(s)));
  return s == UCS_OK;
}

void UcxWorker::Close(ucp_ep_h endpoint) {
  ucp_request_param_t parameters{};
  parameters.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  parameters.flags = UCP_EP_CLOSE_FLAG_FORCE;
  void* request = ucp_ep_close_nbx(endpoint, &parameters);
  if (!UCS_PTR_IS_PTR(request)) return;
  while (ucp_request_check_status(request) == UCS_INPROGRESS) ucp_worker_progress(worker_);
  ucp_request_free(request);
}

}  // namespace kvsummary
