// Memory of a cache, opened in this process, and the table of what is open. Private to libkvsummary.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "client/direct/kvsummary.h"
#include "client/plain_status.h"
#include "kernels/update.h"

namespace kvsummary::direct {

// Unmapped when destroyed.
class Mapping {
 public:
  virtual ~Mapping() = default;
  void* data() const { return data_; }
  // For this memory, whatever device is the caller's.
  virtual const UpdateKernels& kernels() const = 0;
  // Multiple that row pointers and strides must keep, in bytes.
  virtual std::int64_t alignment() const = 0;
  // Name of an error of kernels().
  virtual std::string ErrorText(int error) const = 0;

 protected:
  explicit Mapping(void* data) : data_(data) {}

 private:
  void* const data_;
};

struct OpenResult {
  PlainStatus status;
  std::unique_ptr<Mapping> mapping;  // null unless ok
};

// The mapping of args.handle: one that is open already, or a new one. The arguments are checked here, but
// for the geometry.
PlainStatus FindOrOpen(const kvs_map_args& args, std::shared_ptr<const Mapping>* mapping);

// The two kinds of CUDA memory. `descriptor` is the caller's. Absent from a build without CUDA, where they
// are refused.
OpenResult OpenCudaVmm(int descriptor, std::uint64_t segment_bytes, const std::string& device_uuid);
OpenResult OpenCudaIpc(const kvs_map_args& args);

}  // namespace kvsummary::direct
