// Buffers over memory that the daemon has mapped.
#pragma once

#include <memory>
#include <string>

#include "server/device/device.h"
#include "server/memory/memory.h"
#include "server/session/buffer.h"

namespace kvsummary {

// Unmapped on the thread of its last reference. `identity` as MapClientMemfd answers it.
std::shared_ptr<Buffer> MakeHostBuffer(std::unique_ptr<Memory> memory, std::string identity);

// Host memory that the device reads where it lies, as far as it can. Pinned, and at the end unpinned and then
// unmapped, on the device's executor, behind the work that is queued there.
std::shared_ptr<Buffer> MakePinnedBuffer(std::unique_ptr<Memory> memory, Device& device,
                                         std::string identity);

// Unmapped on the device's executor, behind the work that is queued there.
std::shared_ptr<Buffer> MakeDeviceBuffer(std::unique_ptr<Memory> memory, Device& device,
                                         std::string identity);

}  // namespace kvsummary
