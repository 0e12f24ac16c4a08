#include "server/session/memory_buffer.h"

#include <gtest/gtest.h>

#include <future>
#include <string>
#include <vector>

namespace kvsummary {
namespace {

// A device that keeps a list of what is done to host memory.
class PinningDevice final : public Device {
 public:
  PinningDevice() : Device("test:0", 1 << 20) {}
  std::string description() const override { return "test"; }
  absl::StatusOr<std::unique_ptr<Memory>> Allocate(std::int64_t bytes, MemoryKind) override {
    return AllocateHostMemory(bytes);
  }
  bool pins_host_memory() const override { return true; }
  void PinHost(char* data, std::int64_t bytes) override {
    data[bytes - 1] = 1;
    done.emplace_back("pinned");
  }
  void UnpinHost(char* data) override {
    data[0] = 1;  // still mapped
    done.emplace_back("unpinned");
  }
  absl::Status Apply(const CacheView&, const Step&, RowsIn) override { return absl::OkStatus(); }
  absl::Status CopyOut(const Memory&, std::span<const Piece>, char*) override { return absl::OkStatus(); }
  absl::Status CopyIn(Memory&, std::span<const Piece>, const char*) override { return absl::OkStatus(); }

  std::vector<std::string> done;  // the executor's

 private:
  absl::Status DoOpen() override { return absl::OkStatus(); }
};

TEST(PinnedBuffer, IsUnpinnedAndThenUnmappedBehindTheWorkThatWasQueued) {
  PinningDevice device;
  auto buffer = MakePinnedBuffer(*AllocateHostMemory(4096), device, "memfd:1");
  EXPECT_EQ(buffer->device(), "");  // rows of it are the host's
  EXPECT_EQ(buffer->bytes(), 4096);
  EXPECT_EQ(buffer->identity(), "memfd:1");
  buffer->OnUnmapped([&] { device.done.emplace_back("unmapped"); });
  std::promise<void> go;
  ASSERT_TRUE(device.executor()
                  .Submit([&] {
                    go.get_future().wait();
                    device.done.emplace_back("worked");
                  })
                  .ok());
  buffer.reset();
  go.set_value();
  device.executor().Stop();
  EXPECT_EQ(device.done, (std::vector<std::string>{"pinned", "worked", "unpinned", "unmapped"}));
}

TEST(PinnedBuffer, OutlivesItsOwnersUntilItHasBeenPinned) {
  PinningDevice device;
  std::promise<void> go;
  ASSERT_TRUE(device.executor().Submit([&] { go.get_future().wait(); }).ok());
  MakePinnedBuffer(*AllocateHostMemory(4096), device, "")->OnUnmapped([&] {
    device.done.emplace_back("unmapped");
  });
  go.set_value();
  device.executor().Stop();
  EXPECT_EQ(device.done, (std::vector<std::string>{"pinned", "unpinned", "unmapped"}));
}

}  // namespace
}  // namespace kvsummary
