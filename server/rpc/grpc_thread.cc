#include "server/rpc/grpc_thread.h"

#include <grpcpp/alarm.h>

#include <chrono>
#include <utility>

namespace kvsummary {

void OnGrpcThread(std::function<void()> work) {
  auto* alarm = new grpc::Alarm;
  alarm->Set(std::chrono::system_clock::now(), [alarm, work = std::move(work)](bool /*ok*/) {
    work();
    delete alarm;  // keeps this closure alive until it has returned
  });
}

}  // namespace kvsummary
