#include "server/ucx/environment.h"

#include <unistd.h>

#include <algorithm>

namespace kvsummary {
namespace {

struct Setting {
  const char* name;
  const char* value;
};

constexpr Setting kSettings[] = {
    {"UCX_TLS", "tcp"},  // within a host the daemon has a better way than UCX
    // Bytes go through UCX's buffers. Without these two it sends them from their place, at 1.5 times the
    // rate, and ends the process now and then (1.13.1: assertions at tcp_ep.c:939 and uct_iface.h:884) when a
    // peer has stalled or died while it was sent to.
    {"UCX_TCP_PUT_ENABLE", "n"},
    {"UCX_ZCOPY_THRESH", "inf"},
    // 8 KiB by default, which quarters the rate.
    {"UCX_TCP_TX_SEG_SIZE", "64K"},
    {"UCX_TCP_RX_SEG_SIZE", "64K"},
    // To notice a dead peer sooner than in a quarter of an hour. USER_TIMEOUT exists from 1.22 on.
    {"UCX_KEEPALIVE_INTERVAL", "1s"},
    {"UCX_TCP_KEEPIDLE", "1s"},
    {"UCX_TCP_KEEPINTVL", "500ms"},
    {"UCX_TCP_KEEPCNT", "3"},
    {"UCX_TCP_USER_TIMEOUT", "3s"},
    // No signal handlers, no patched mmap and munmap, no files under /tmp.
    {"UCX_HANDLE_ERRORS", "none"},
    {"UCX_DEBUG_SIGNO", "0"},
    {"UCX_MEM_EVENTS", "n"},
    {"UCX_VFS_ENABLE", "n"},
    {"UCX_WARN_UNUSED_ENV_VARS", "n"},
    {"UCX_LOG_LEVEL", "warn"},
};

}  // namespace

std::vector<std::string> UcxEnvironment(const std::string& net_device) {
  std::vector<std::string> variables;
  for (char** variable = environ; *variable != nullptr; ++variable) variables.emplace_back(*variable);
  const auto add = [&](const std::string& name, const std::string& value) {
    const std::string start = name + "=";
    const bool present = std::any_of(variables.begin(), variables.end(), [&](const std::string& v) {
      return v.compare(0, start.size(), start) == 0;
    });
    if (!present) variables.push_back(start + value);
  };
  add("UCX_NET_DEVICES", net_device);
  for (const Setting& setting : kSettings) add(setting.name, setting.value);
  return variables;
}

}  // namespace kvsummary
