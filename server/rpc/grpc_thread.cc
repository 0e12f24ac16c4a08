#include "server/rpc/grpc_thread.h"

#include <grpcpp/alarm.h>

#include <utility>

namespace kvsummary {

void OnGrpcThread(std::function<void()> work) {
  OnGrpcThreadAfter(std::chrono::milliseconds(0), std::move(work));
}

void OnGrpcThreadAfter(std::chrono::milliseconds delay, std::function<void()> work) {
  auto* alarm = new grpc::Alarm;
  alarm->Set(std::chrono::system_clock::now() + delay, [alarm, work = std::move(work)](bool /*ok*/) {
    work();
    delete alarm;  // keeps this closure alive until it has returned
  });
}

}  // namespace kvsummary
