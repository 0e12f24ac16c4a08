// A summaryd of this program's own: a child process that listens on a Unix socket in a folder made for it.
//
// It ends with this object, and also when this process dies without saying goodbye; then the folder stays. A
// signal of the terminal reaches this process alone, which ends it when it is ready to.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kvsummary {

class OwnDaemon {
 public:
  // Starts the binary with these flags and --listen, and waits until it answers. `binary` empty: "summaryd"
  // beside this program, else in $PATH. NOT_FOUND where there is none; UNAVAILABLE, with the end of its log,
  // when it does not answer within seconds. Call it from a thread that lives as long as the daemon shall.
  static absl::StatusOr<std::unique_ptr<OwnDaemon>> Start(const std::string& binary,
                                                          const std::vector<std::string>& flags);
  // Ends it, if need be by force, and removes the folder.
  ~OwnDaemon();
  OwnDaemon(const OwnDaemon&) = delete;
  OwnDaemon& operator=(const OwnDaemon&) = delete;

  std::string address() const { return "unix:" + folder_ + "/s"; }

 private:
  explicit OwnDaemon(std::string folder) : folder_(std::move(folder)) {}
  absl::Status Run(const std::string& binary, const std::vector<std::string>& flags);
  bool HasEnded();
  std::string log() const { return folder_ + "/log"; }
  // Its end, for an error.
  std::string LogTail() const;

  const std::string folder_;
  pid_t process_ = -1;
};

}  // namespace kvsummary
