#include "server/ops/grpc_log.h"

#include <grpc/support/log.h>
#include <spdlog/spdlog.h>

#include <utility>

namespace kvsummary {
namespace {

void Log(gpr_log_func_args* line) {
  static LogLimit limit;
  const auto left_out = limit.Take(std::chrono::steady_clock::now());
  if (!left_out) return;
  if (*left_out > 0) spdlog::warn("gRPC: {} lines left out", *left_out);
  spdlog::warn("gRPC: {}", line->message);
}

}  // namespace

std::optional<std::int64_t> LogLimit::Take(Time now) {
  const std::lock_guard lock(mutex_);
  if (taken_ == 0 || now - since_ >= std::chrono::minutes(1)) {
    since_ = now;
    taken_ = 0;
  }
  if (taken_ == kBurst) {
    ++left_out_;
    return std::nullopt;
  }
  ++taken_;
  return std::exchange(left_out_, 0);
}

void TakeGrpcLog() { gpr_set_log_function(Log); }

}  // namespace kvsummary
