#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>

#include "tests/gpu/device.h"

namespace kvsummary::gpu {
namespace {

cudaStream_t AsStream(void* stream) { return static_cast<cudaStream_t>(stream); }

}  // namespace

void Check(int error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(static_cast<cudaError_t>(error)));
  std::_Exit(2);
}

std::string DescribeDevice() {
  cudaDeviceProp p;
  Check(cudaGetDeviceProperties(&p, 0), "device 0");
  int driver = 0;
  Check(cudaDriverGetVersion(&driver), "driver version");
  return std::string(p.name) + ", sm_" + std::to_string(p.major) + std::to_string(p.minor) +
         ", CUDA driver " + std::to_string(driver / 1000) + "." + std::to_string(driver % 1000 / 10);
}

Stream::Stream() {
  cudaStream_t s;
  Check(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking), "stream");
  stream_ = s;
}
Stream::~Stream() { cudaStreamDestroy(AsStream(stream_)); }
void Stream::Synchronize() const { Check(cudaStreamSynchronize(AsStream(stream_)), "synchronize"); }

DeviceMemory::DeviceMemory(std::size_t bytes) : size_(bytes) {
  Check(cudaMalloc(&memory_, bytes), "cudaMalloc");
}
DeviceMemory::~DeviceMemory() { cudaFree(memory_); }

void DeviceMemory::Upload(const void* data, std::size_t bytes, const Stream& stream) {
  if (bytes > size_) Check(cudaErrorInvalidValue, "upload larger than the memory");
  Check(cudaMemcpyAsync(memory_, data, bytes, cudaMemcpyHostToDevice, AsStream(stream.get())), "upload");
}
void DeviceMemory::Download(void* data, std::size_t bytes, const Stream& stream) const {
  if (bytes > size_) Check(cudaErrorInvalidValue, "download larger than the memory");
  Check(cudaMemcpyAsync(data, memory_, bytes, cudaMemcpyDeviceToHost, AsStream(stream.get())), "download");
  stream.Synchronize();
}

Graph::Graph(const Stream& stream, const std::function<void()>& body) : stream_(stream.get()) {
  Check(cudaStreamBeginCapture(AsStream(stream_), cudaStreamCaptureModeThreadLocal), "begin capture");
  body();
  cudaGraph_t graph = nullptr;
  Check(cudaStreamEndCapture(AsStream(stream_), &graph), "end capture");
  cudaGraphExec_t executable = nullptr;
  Check(cudaGraphInstantiate(&executable, graph, 0), "instantiate");
  cudaGraphDestroy(graph);
  executable_ = executable;
}
Graph::~Graph() { cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(executable_)); }
void Graph::Replay() const {
  Check(cudaGraphLaunch(static_cast<cudaGraphExec_t>(executable_), AsStream(stream_)), "graph launch");
}

}  // namespace kvsummary::gpu
