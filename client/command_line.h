// The command line of summaryctl: a table of commands, each with its flags.
//
// Flags stand anywhere, before or after the command, as --flag=value or --flag value; a switch takes no
// value. Everything is checked before a command runs, so a command finds only well-formed values.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/client.h"

namespace kvsummary {

// Whether a value is well formed; the message is shown after "--flag=value: ".
using FlagCheck = absl::Status (*)(const std::string& value);

absl::Status AnyText(const std::string& value);
absl::Status CheckInt32(const std::string& value);
absl::Status CheckInt64(const std::string& value);
absl::Status CheckBytes(const std::string& value);   // 8GiB, 64KiB, 4096
absl::Status CheckList(const std::string& value);    // 1,4-7
absl::Status CheckLayers(const std::string& value);  // FIRST:COUNT

struct Flag {
  const char* name;      // without dashes
  const char* value;     // what help calls the value; null: a switch
  const char* fallback;  // value of a flag that is not given; null: it must be given
  const char* help;
  FlagCheck check = AnyText;  // not applied to the fallback
};

struct Invocation;

struct Command {
  const char* name;
  const char* files;  // "FILE..." where it takes files, else ""
  const char* summary;
  std::vector<Flag> flags;
  int (*run)(const Invocation&);  // returns the exit code
};

// The flags that every command has: where the daemon listens, and TLS.
extern const std::vector<Flag> kCommonFlags;

// A command with the values of all its flags. Getters require that the flag exists with such a check.
struct Invocation {
  const Command* command = nullptr;  // null: help about everything is asked for
  bool help = false;
  std::map<std::string, std::string> flags;
  std::vector<std::string> files;

  const std::string& Text(const std::string& flag) const { return flags.at(flag); }
  bool Given(const std::string& flag) const { return !Text(flag).empty(); }
  bool On(const std::string& flag) const { return Given(flag); }  // of a switch
  std::int32_t Int32(const std::string& flag) const;
  std::int64_t Int64(const std::string& flag) const;
  std::int64_t Bytes(const std::string& flag) const;
  std::vector<std::int64_t> List(const std::string& flag) const;
  LayerSpan Layers(const std::string& flag) const;

  // --address, $SUMMARYD_ADDRESS, or the default.
  std::string Address() const;
  // --tls-ca, --tls-cert and --tls-key.
  TlsFiles Tls() const;
  // To this address, or to Address(), with Tls().
  absl::StatusOr<std::unique_ptr<Client>> Connect(const std::string& address) const;
  absl::StatusOr<std::unique_ptr<Client>> Connect() const { return Connect(Address()); }
};

// INVALID_ARGUMENT with a text for the user: unknown command or flag, a missing or malformed value.
absl::StatusOr<Invocation> ParseCommandLine(std::span<const Command> commands,
                                            const std::vector<std::string>& arguments);

// Help about all commands, or about one.
std::string Help(std::span<const Command> commands);
std::string Help(const Command& command);

}  // namespace kvsummary
