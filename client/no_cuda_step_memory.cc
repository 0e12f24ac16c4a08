// Step memory of a build without CUDA.
#include "absl/strings/str_cat.h"
#include "client/status.h"
#include "client/step_memory.h"

namespace kvsummary {

absl::StatusOr<std::unique_ptr<StepMemory>> MakeCudaStepMemory(const std::string& device_uuid) {
  return FromPlain({kPlainFailedPrecondition, "DEVICE_NOT_VISIBLE",
                    absl::StrCat("this program is built without CUDA: it cannot use ", device_uuid)});
}

}  // namespace kvsummary
