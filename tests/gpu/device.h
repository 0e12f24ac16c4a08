// The little of the CUDA runtime that the GPU tests need, without CUDA types. Any error ends the program
// with its name: a test of kernels has nothing to say on a broken device.
#pragma once

#include <cstddef>
#include <functional>
#include <string>

namespace kvsummary::gpu {

// Ends the program unless `error` (a cudaError_t) is 0.
void Check(int error, const char* what);

// Name, compute capability and driver of device 0.
std::string DescribeDevice();

class Stream {
 public:
  Stream();
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  void* get() const { return stream_; }
  void Synchronize() const;

 private:
  void* stream_ = nullptr;
};

class DeviceMemory {
 public:
  explicit DeviceMemory(std::size_t bytes);
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  void* get() const { return memory_; }
  std::size_t size() const { return size_; }
  // Queued on the stream; `data` may be reused on return.
  void Upload(const void* data, std::size_t bytes, const Stream& stream);
  // Complete on return, after everything queued before.
  void Download(void* data, std::size_t bytes, const Stream& stream) const;

 private:
  void* memory_ = nullptr;
  std::size_t size_ = 0;
};

// What `body` queues on the stream, captured; Replay queues it again.
class Graph {
 public:
  Graph(const Stream& stream, const std::function<void()>& body);
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  void Replay() const;

 private:
  void* stream_;
  void* executable_ = nullptr;
};

}  // namespace kvsummary::gpu
