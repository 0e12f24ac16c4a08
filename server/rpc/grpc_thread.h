// Work that is too long for the thread that finds it.
#pragma once

#include <chrono>
#include <functional>

namespace kvsummary {

// Runs `work` on a thread of gRPC's.
void OnGrpcThread(std::function<void()> work);
// When `delay` has passed.
void OnGrpcThreadAfter(std::chrono::milliseconds delay, std::function<void()> work);

}  // namespace kvsummary
