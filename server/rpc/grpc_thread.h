// Work that is too long for the thread that finds it.
#pragma once

#include <functional>

namespace kvsummary {

// Runs `work` on a thread of gRPC's.
void OnGrpcThread(std::function<void()> work);

}  // namespace kvsummary
