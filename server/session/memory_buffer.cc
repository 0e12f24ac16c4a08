#include "server/session/memory_buffer.h"

#include <utility>

namespace kvsummary {
namespace {

class MemoryBuffer final : public Buffer {
 public:
  MemoryBuffer(std::unique_ptr<Memory> memory, std::string device, std::string identity)
      : Buffer(static_cast<char*>(memory->data()), memory->bytes(), std::move(device), std::move(identity)),
        memory_(std::move(memory)) {}

 private:
  const std::unique_ptr<Memory> memory_;
};

}  // namespace

std::shared_ptr<Buffer> MakeHostBuffer(std::unique_ptr<Memory> memory, std::string identity) {
  return std::make_shared<MemoryBuffer>(std::move(memory), "", std::move(identity));
}

std::shared_ptr<Buffer> MakePinnedBuffer(std::unique_ptr<Memory> memory, Device& device,
                                         std::string identity) {
  std::shared_ptr<Buffer> buffer(
      new MemoryBuffer(std::move(memory), "", std::move(identity)), [&device](Buffer* released) {
        device.executor().SubmitFree([&device, owned = std::unique_ptr<Buffer>(released)] {
          device.UnpinHost(owned->data());  // what was pinned is unmapped with this closure
        });
      });
  // A full queue leaves it unpinned: then its rows are copied.
  device.executor()
      .Submit([&device, buffer] { device.PinHost(buffer->data(), buffer->bytes()); })
      .IgnoreError();
  return buffer;
}

std::shared_ptr<Buffer> MakeDeviceBuffer(std::unique_ptr<Memory> memory, Device& device,
                                         std::string identity) {
  return {new MemoryBuffer(std::move(memory), device.name(), std::move(identity)), [&device](Buffer* buffer) {
            device.executor().SubmitFree([owned = std::unique_ptr<Buffer>(buffer)] {});
          }};
}

}  // namespace kvsummary
