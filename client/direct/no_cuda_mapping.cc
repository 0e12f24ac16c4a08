// CUDA memory in a library built without CUDA: refused.
#include "client/direct/mapping.h"

namespace kvsummary::direct {
namespace {

OpenResult Refuse() {
  return {{kPlainUnimplemented, "MEMORY_KIND_UNSUPPORTED", "this library is built without CUDA"}, nullptr};
}

}  // namespace

OpenResult OpenCudaVmm(int, std::uint64_t, const std::string&) { return Refuse(); }
OpenResult OpenCudaIpc(const kvs_map_args&) { return Refuse(); }

}  // namespace kvsummary::direct
