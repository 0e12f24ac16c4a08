#include "server/rpc/peer_memory.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "client/fake_descriptor_socket.h"
#include "kernels/update.h"

namespace kvsummary {
namespace {

constexpr std::int64_t kBytes = 2 << 20;
constexpr int kAllSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL | F_SEAL_FUTURE_WRITE;

OwnedDescriptor MakePeersMemfd(int seals, unsigned flags = 0) {
  OwnedDescriptor fd(memfd_create("kvs-test", MFD_CLOEXEC | MFD_ALLOW_SEALING | flags));
  if (!fd.valid() || ftruncate(fd.get(), kBytes) != 0) return {};
  if ((flags & MFD_HUGETLB) == 0 && pwrite(fd.get(), "first", 5, 0) != 5) std::abort();
  if (fcntl(fd.get(), F_ADD_SEALS, seals) != 0) std::abort();
  return fd;
}

// What a source's descriptor socket lends for a ticket.
class PeerMemoryTest : public ::testing::Test {
 protected:
  PeerMemory::View Open(const OwnedDescriptor& lent, std::int64_t bytes = kBytes, bool local = true) {
    const FakeDescriptorSocket socket([&](const DescriptorRequest& /*request*/, const OwnedDescriptor&) {
      FakeAnswer answer{.reply = {}, .descriptors = {lent.get()}};
      answer.reply.size_bytes = static_cast<std::uint64_t>(bytes);
      return answer;
    });
    v1::PullAccepted accepted;
    accepted.set_descriptor_socket(socket.path());
    accepted.mutable_memory()->set_kind(v1::MEMORY_KIND_MEMFD);
    accepted.mutable_memory()->set_size_bytes(bytes);
    accepted.mutable_memory()->set_handle(std::string(kTicketBytes, 't'));
    PeerMemory memory(local);
    return memory.Open(accepted, *device_);
  }

  const std::unique_ptr<Device> device_ = MakeHostDevice(HostKernels(), 1 << 20);
};

TEST_F(PeerMemoryTest, WhatStaysThereIsMapped) {
  for (const int seals : {kAllSeals, F_SEAL_SHRINK | F_SEAL_FUTURE_WRITE}) {
    const auto view = Open(MakePeersMemfd(seals));
    ASSERT_NE(view.mapping, nullptr) << seals;
    EXPECT_EQ(view.bytes, kBytes);
    EXPECT_EQ(std::string(view.mapping->data(), 5), "first");
    EXPECT_EQ(view.mapping->data()[kBytes - 1], 0) << "holes are zeros";
  }
}

TEST_F(PeerMemoryTest, WhatItsOwnerCouldTakeAwayIsNot) {
  for (const int seals : {0, F_SEAL_SHRINK | F_SEAL_GROW, F_SEAL_GROW | F_SEAL_FUTURE_WRITE,
                          F_SEAL_GROW | F_SEAL_WRITE, F_SEAL_SHRINK | F_SEAL_SEAL}) {
    EXPECT_FALSE(Open(MakePeersMemfd(seals))) << seals;
  }
  char path[] = "/tmp/kvs-XXXXXX";
  const OwnedDescriptor file(mkostemp(path, O_CLOEXEC));
  unlink(path);
  ASSERT_EQ(ftruncate(file.get(), kBytes), 0);
  EXPECT_FALSE(Open(file)) << "no memfd";
}

TEST_F(PeerMemoryTest, NeitherIsLessThanWasAnnounced) {
  EXPECT_FALSE(Open(MakePeersMemfd(kAllSeals), kBytes + 4096));
  EXPECT_FALSE(Open(MakePeersMemfd(kAllSeals), kBytes, false)) << "of another host";
}

// Every fault would take one of the pages set aside; there may be none.
TEST_F(PeerMemoryTest, HugePagesHaveToBeThere) {
  const OwnedDescriptor huge = MakePeersMemfd(kAllSeals, MFD_HUGETLB);
  if (!huge.valid()) GTEST_SKIP() << "no huge pages here";
  if (const auto view = Open(huge); view.mapping != nullptr) {
    EXPECT_EQ(view.mapping->data()[kBytes - 1], 0);
  }
}

}  // namespace
}  // namespace kvsummary
