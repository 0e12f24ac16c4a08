// summaryd-ucx of a build without UCX: says so.
#include "server/ucx/control.h"

int main() {
  kvsummary::UcxControl control(kvsummary::kUcxControlFd);
  control.Refuse(
      absl::UnimplementedError("this build of summaryd-ucx has no UCX: libucx-dev was not installed"));
  return 1;
}
