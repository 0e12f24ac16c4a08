// Needs a GPU. Another process's memory comes from a child that is forked before CUDA is used.
#include "server/device/cuda_memory.h"

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>

#include "server/error.h"

namespace kvsummary {
namespace {

constexpr std::int64_t kBytes = 3 << 20;

// A process that holds device memory: sends its handle when it is made, and frees it when told.
class Exporter {
 public:
  void Start() {
    if (pipe(commands_) != 0 || pipe(answers_) != 0) std::abort();
    child_ = fork();
    if (child_ == 0) Run();
  }
  std::string Handle() {
    cudaIpcMemHandle_t handle{};
    Ask('a', &handle, sizeof(handle));
    return {handle.reserved, sizeof(handle.reserved)};
  }
  // What the first byte of the memory is.
  unsigned char FirstByte() {
    unsigned char byte = 0;
    Ask('r', &byte, 1);
    return byte;
  }
  void Free() {
    char done = 0;
    Ask('f', &done, 1);
  }
  void Stop() {
    close(commands_[1]);
    int state = 0;
    waitpid(child_, &state, 0);
  }

 private:
  void Ask(char command, void* answer, std::size_t bytes) {
    if (write(commands_[1], &command, 1) != 1 ||
        read(answers_[0], answer, bytes) != static_cast<ssize_t>(bytes)) {
      std::abort();
    }
  }
  [[noreturn]] void Run() {
    close(commands_[1]);
    void* data = nullptr;
    for (char command = 0; read(commands_[0], &command, 1) == 1;) {
      if (command == 'a') {
        cudaIpcMemHandle_t handle{};
        if (cudaMalloc(&data, kBytes) != cudaSuccess || cudaMemset(data, 5, kBytes) != cudaSuccess ||
            cudaIpcGetMemHandle(&handle, data) != cudaSuccess ||
            write(answers_[1], &handle, sizeof(handle)) < 0) {
          _exit(1);
        }
      } else if (command == 'r') {
        unsigned char byte = 0;
        if (cudaMemcpy(&byte, data, 1, cudaMemcpyDeviceToHost) != cudaSuccess ||
            write(answers_[1], &byte, 1) < 0) {
          _exit(1);
        }
      } else {
        if (cudaFree(data) != cudaSuccess || write(answers_[1], &command, 1) < 0) _exit(1);
      }
    }
    _exit(0);
  }
  int commands_[2];
  int answers_[2];
  pid_t child_ = -1;
};

Exporter exporter;

class CudaMemoryTest : public ::testing::Test {
 protected:
  CudaMemoryTest() {
    cudaSetDevice(0);
    cudaFree(nullptr);
  }
  static std::string Reason(const absl::StatusOr<std::unique_ptr<Memory>>& memory) {
    return memory.ok() ? "OK"
                       : RefusalReason(memory.status()) + ": " + std::string(memory.status().message());
  }
  const CudaDeviceId device_{"cuda:0", 0, false};
  CudaIpcHandles handles_{device_};
};

TEST_F(CudaMemoryTest, SizesAreRoundedAndKindsKnown) {
  EXPECT_EQ(*CudaAllocationBytes(device_, 1, MemoryKind::kCudaVmm), 2 << 20);
  EXPECT_EQ(*CudaAllocationBytes(device_, (2 << 20) + 1, MemoryKind::kCudaIpc), 4 << 20);
  EXPECT_EQ(RefusalReason(CudaAllocationBytes(device_, 1, MemoryKind::kMemfd).status()),
            "MEMORY_KIND_UNSUPPORTED");
  const CudaDeviceId mig{"cuda:0", 0, true};
  EXPECT_EQ(RefusalReason(CudaAllocationBytes(mig, 1, MemoryKind::kCudaIpc).status()), "CUDA_IPC_MIG");
  EXPECT_EQ(RefusalReason(CudaIpcHandles(mig).Open(std::string(64, 0), 0, 1).status()), "CUDA_IPC_MIG");
}

TEST_F(CudaMemoryTest, VmmMemoryHasADescriptorAndIsFreedWithItsObject) {
  std::size_t before = 0;
  std::size_t during = 0;
  std::size_t after = 0;
  std::size_t total = 0;
  { auto warm = AllocateCudaVmm(device_, 4 << 20); }
  cudaMemGetInfo(&before, &total);
  {
    auto memory = AllocateCudaVmm(device_, 256 << 20);
    ASSERT_EQ(Reason(memory), "OK");
    EXPECT_GE((*memory)->descriptor(), 0);
    EXPECT_EQ((*memory)->kind(), MemoryKind::kCudaVmm);
    EXPECT_EQ(cudaMemset((*memory)->data(), 1, 256 << 20), cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    cudaMemGetInfo(&during, &total);
  }
  cudaMemGetInfo(&after, &total);
  EXPECT_EQ(before - during, std::size_t{256} << 20);
  EXPECT_EQ(before, after);
}

TEST_F(CudaMemoryTest, MoreThanThereIsIsRefusedAndTheDeviceStaysSound) {
  EXPECT_EQ(RefusalReason(AllocateCudaVmm(device_, std::int64_t{1} << 40).status()), "OUT_OF_MEMORY");
  EXPECT_EQ(RefusalReason(AllocateCudaIpc(device_, std::int64_t{1} << 40).status()), "OUT_OF_MEMORY");
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

TEST_F(CudaMemoryTest, AHandleDoesNotOpenInItsOwnProcess) {
  const auto memory = AllocateCudaIpc(device_, 4 << 20);
  ASSERT_EQ(Reason(memory), "OK");
  ASSERT_EQ((*memory)->ipc_handle().size(), 64u);
  EXPECT_EQ(RefusalReason(handles_.Open((*memory)->ipc_handle(), 0, 1).status()), "CUDA_IPC_SAME_PROCESS");
}

TEST_F(CudaMemoryTest, HandlesOfAnotherProcessOpenAsOftenAsAskedWithinTheirBounds) {
  const std::string handle = exporter.Handle();
  auto first = handles_.Open(handle, 0, kBytes);
  auto second = handles_.Open(handle, 512, 1024);
  ASSERT_EQ(Reason(first), "OK");
  ASSERT_EQ(Reason(second), "OK");
  unsigned char byte = 0;
  ASSERT_EQ(cudaMemcpy(&byte, (*first)->data(), 1, cudaMemcpyDeviceToHost), cudaSuccess);
  EXPECT_EQ(byte, 5);
  first = absl::NotFoundError("closed");
  ASSERT_EQ(cudaMemset(static_cast<char*>((*second)->data()) - 512, 6, 1), cudaSuccess);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(exporter.FirstByte(), 6);
  EXPECT_EQ(RefusalReason(handles_.Open(handle, 0, 64 << 20).status()), "MEMFD_TOO_SMALL");
  EXPECT_EQ(RefusalReason(handles_.Open(handle, INT64_MAX, 1).status()), "MEMFD_TOO_SMALL");
  second = absl::NotFoundError("closed");
  exporter.Free();
  EXPECT_EQ(RefusalReason(handles_.Open(handle, 0, 1).status()), "HANDLE_INVALID");  // freed before
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

TEST_F(CudaMemoryTest, AnOpenHandleIsOpenedAgainInAMicrosecond) {
  const std::string handle = exporter.Handle();
  constexpr int kOpens = 100'000;
  const auto time = [&] {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < kOpens; ++i) {
      if (!handles_.Open(handle, 256, 1024).ok()) std::abort();
    }
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count() /
           kOpens;
  };
  const auto opened = std::chrono::steady_clock::now();
  {
    const auto first = handles_.Open(handle, 0, kBytes);
    const std::chrono::duration<double, std::micro> once = std::chrono::steady_clock::now() - opened;
    ASSERT_EQ(Reason(first), "OK");
    const double again = time();
    std::printf("opened in %.1f us, again in %.3f us\n", once.count(), again);
    EXPECT_LT(again, 1);
  }
  exporter.Free();
  EXPECT_EQ(RefusalReason(handles_.Open(handle, 0, 1).status()), "HANDLE_INVALID");  // it was closed
}

TEST_F(CudaMemoryTest, RubbishIsNoHandle) {
  EXPECT_EQ(RefusalReason(handles_.Open("", 0, 1).status()), "HANDLE_INVALID");
  EXPECT_EQ(RefusalReason(handles_.Open(std::string(63, 'x'), 0, 1).status()), "HANDLE_INVALID");
  EXPECT_EQ(RefusalReason(handles_.Open(std::string(64, 'x'), 0, 1).status()), "HANDLE_INVALID");
  EXPECT_EQ(RefusalReason(handles_.Open(std::string(64, '\0'), 0, 1).status()), "HANDLE_INVALID");
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

}  // namespace
}  // namespace kvsummary

int main(int argc, char** argv) {
  kvsummary::exporter.Start();
  ::testing::InitGoogleTest(&argc, argv);
  const int result = RUN_ALL_TESTS();
  kvsummary::exporter.Stop();
  return result;
}
