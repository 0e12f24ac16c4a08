#include "client/command_line.h"

#include <algorithm>
#include <cstdlib>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "client/units.h"

namespace kvsummary {
namespace {

constexpr char kDefaultAddress[] = "unix:/run/summaryd/summaryd.sock";
constexpr std::int64_t kMaxListed = 1 << 24;  // blocks; a mistyped range shall not take all memory

// A number of digits only: SimpleAtoi would take spaces and signs.
bool ParseIndex(const std::string& text, std::int64_t* value) {
  return !text.empty() && text.find_first_not_of("0123456789") == std::string::npos &&
         absl::SimpleAtoi(text, value);
}

absl::StatusOr<std::vector<std::int64_t>> ParseList(const std::string& text) {
  std::vector<std::int64_t> list;
  const std::vector<std::string> parts = absl::StrSplit(text, ',');
  for (const std::string& part : parts) {
    const std::vector<std::string> ends = absl::StrSplit(part, '-');
    std::int64_t first = 0;
    std::int64_t last = 0;
    if (ends.size() > 2 || !ParseIndex(ends.front(), &first) || !ParseIndex(ends.back(), &last)) {
      return absl::InvalidArgumentError(
          absl::StrCat("\"", part, "\" is neither a number nor a range; a list looks like 1,4-7"));
    }
    if (last < first) return absl::InvalidArgumentError(absl::StrCat("the range ", part, " falls"));
    if (last - first >= kMaxListed - static_cast<std::int64_t>(list.size())) {
      return absl::InvalidArgumentError(absl::StrCat("more than ", kMaxListed, " numbers"));
    }
    for (std::int64_t i = first; i <= last; ++i) list.push_back(i);
  }
  return list;
}

absl::StatusOr<LayerSpan> ParseLayers(const std::string& text) {
  const std::vector<std::string> parts = absl::StrSplit(text, ':');
  LayerSpan layers;
  if (parts.size() != 2 || !absl::SimpleAtoi(parts[0], &layers.first) ||
      !absl::SimpleAtoi(parts[1], &layers.count)) {
    return absl::InvalidArgumentError("not of the form FIRST:COUNT");
  }
  return layers;
}

const Command* FindCommand(std::span<const Command> commands, const std::string& name) {
  const auto found = std::find_if(commands.begin(), commands.end(),
                                  [&](const Command& command) { return command.name == name; });
  return found == commands.end() ? nullptr : &*found;
}

const Flag* FindFlag(const Command& command, const std::string& name) {
  for (const std::vector<Flag>* flags : {&kCommonFlags, &command.flags}) {
    const auto found =
        std::find_if(flags->begin(), flags->end(), [&](const Flag& flag) { return flag.name == name; });
    if (found != flags->end()) return &*found;
  }
  return nullptr;
}

// Before the command is known, a flag takes a value unless it is a switch of some command.
bool IsSwitch(std::span<const Command> commands, const std::string& name) {
  return name == "help" || std::any_of(commands.begin(), commands.end(), [&](const Command& command) {
           const Flag* flag = FindFlag(command, name);
           return flag != nullptr && flag->value == nullptr;
         });
}

std::string KnownFlags(const Command& command) {
  std::vector<std::string> names;
  for (const std::vector<Flag>* flags : {&kCommonFlags, &command.flags}) {
    for (const Flag& flag : *flags) names.push_back(absl::StrCat("--", flag.name));
  }
  return absl::StrJoin(names, " ");
}

// The arguments as flags, in any order, and words.
struct Tokens {
  std::vector<std::pair<std::string, std::string>> flags;
  std::vector<std::string> words;
  bool help = false;
};

absl::StatusOr<Tokens> Tokenize(std::span<const Command> commands,
                                const std::vector<std::string>& arguments) {
  Tokens tokens;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string& argument = arguments[i];
    if (argument == "--help" || argument == "-h") {
      tokens.help = true;
    } else if (argument == "--") {
      tokens.words.insert(tokens.words.end(), arguments.begin() + static_cast<std::ptrdiff_t>(i) + 1,
                          arguments.end());
      break;
    } else if (argument.rfind("--", 0) == 0) {
      const std::size_t equals = argument.find('=');
      const std::string name = argument.substr(2, equals - 2);
      if (IsSwitch(commands, name)) {
        if (equals != std::string::npos) {
          return absl::InvalidArgumentError(absl::StrCat("--", name, " takes no value"));
        }
        tokens.flags.emplace_back(name, "on");
      } else if (equals != std::string::npos) {
        tokens.flags.emplace_back(name, argument.substr(equals + 1));
      } else if (i + 1 < arguments.size()) {
        tokens.flags.emplace_back(name, arguments[++i]);
      } else {
        return absl::InvalidArgumentError(absl::StrCat("--", name, " needs a value"));
      }
    } else if (argument.size() > 1 && argument[0] == '-') {
      return absl::InvalidArgumentError(absl::StrCat("unknown flag ", argument, "; flags begin with --"));
    } else {
      tokens.words.push_back(argument);
    }
  }
  return tokens;
}

absl::Status SetFlags(const Tokens& tokens, Invocation* invocation) {
  const Command& command = *invocation->command;
  for (const auto& [name, value] : tokens.flags) {
    const Flag* flag = FindFlag(command, name);
    if (flag == nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat(command.name, " has no flag --", name, "; it has ", KnownFlags(command)));
    }
    if (!invocation->flags.emplace(name, value).second) {
      return absl::InvalidArgumentError(absl::StrCat("--", name, " is given twice"));
    }
    if (value.empty()) return absl::InvalidArgumentError(absl::StrCat("--", name, " needs a value"));
    if (auto status = flag->check(value); !status.ok()) {
      return absl::InvalidArgumentError(absl::StrCat("--", name, "=", value, ": ", status.message()));
    }
  }
  for (const Flag& flag : kCommonFlags) invocation->flags.emplace(flag.name, flag.fallback);
  for (const Flag& flag : command.flags) {
    if (flag.fallback != nullptr) {
      invocation->flags.emplace(flag.name, flag.fallback);
    } else if (!invocation->flags.contains(flag.name)) {
      return absl::InvalidArgumentError(absl::StrCat(command.name, " needs --", flag.name));
    }
  }
  return absl::OkStatus();
}

template <typename T>
T ParseNumber(const std::string& text) {
  T value = 0;
  return absl::SimpleAtoi(text, &value) ? value : T{0};
}

std::string FlagHelp(const Flag& flag) {
  const std::string name =
      flag.value == nullptr ? absl::StrCat("--", flag.name) : absl::StrCat("--", flag.name, "=", flag.value);
  std::string note;
  if (flag.fallback == nullptr) {
    note = " (required)";
  } else if (flag.fallback[0] != '\0') {
    note = absl::StrCat(" (default ", flag.fallback, ")");
  }
  return absl::StrFormat("  %-24s %s%s\n", name, flag.help, note);
}

std::string FlagsHelp(const std::vector<Flag>& flags) {
  std::string text;
  for (const Flag& flag : flags) absl::StrAppend(&text, FlagHelp(flag));
  return text;
}

}  // namespace

const std::vector<Flag> kCommonFlags{
    {"address", "ADDRESS", "",
     "unix:PATH or HOST:PORT (default $SUMMARYD_ADDRESS, else unix:/run/summaryd/summaryd.sock)"},
    {"tls-ca", "FILE", "", "TLS to HOST:PORT, whose certificate one of these has signed; in PEM"},
    {"tls-cert", "FILE", "", "with --tls-ca and --tls-key: this side's certificate"},
    {"tls-key", "FILE", "", "the key of --tls-cert"}};

absl::Status AnyText(const std::string&) { return absl::OkStatus(); }

absl::Status CheckInt32(const std::string& value) {
  std::int32_t number = 0;
  if (absl::SimpleAtoi(value, &number)) return absl::OkStatus();
  return absl::InvalidArgumentError("not a whole number of 32 bits");
}

absl::Status CheckInt64(const std::string& value) {
  std::int64_t number = 0;
  if (absl::SimpleAtoi(value, &number)) return absl::OkStatus();
  return absl::InvalidArgumentError("not a whole number of 64 bits");
}

absl::Status CheckBytes(const std::string& value) { return ParseBytes(value).status(); }
absl::Status CheckList(const std::string& value) { return ParseList(value).status(); }
absl::Status CheckLayers(const std::string& value) { return ParseLayers(value).status(); }

std::int32_t Invocation::Int32(const std::string& flag) const {
  return ParseNumber<std::int32_t>(Text(flag));
}
std::int64_t Invocation::Int64(const std::string& flag) const {
  return ParseNumber<std::int64_t>(Text(flag));
}
std::int64_t Invocation::Bytes(const std::string& flag) const { return *ParseBytes(Text(flag)); }
std::vector<std::int64_t> Invocation::List(const std::string& flag) const { return *ParseList(Text(flag)); }
LayerSpan Invocation::Layers(const std::string& flag) const { return *ParseLayers(Text(flag)); }

std::string Invocation::Address() const {
  if (Given("address")) return Text("address");
  const char* variable = std::getenv("SUMMARYD_ADDRESS");
  return variable != nullptr && variable[0] != '\0' ? variable : kDefaultAddress;
}

TlsFiles Invocation::Tls() const {
  return {.ca = Text("tls-ca"), .cert = Text("tls-cert"), .key = Text("tls-key")};
}

absl::StatusOr<std::unique_ptr<Client>> Invocation::Connect(const std::string& address) const {
  return Client::Connect(address, {.tls = Tls()});
}

absl::StatusOr<Invocation> ParseCommandLine(std::span<const Command> commands,
                                            const std::vector<std::string>& arguments) {
  auto tokens = Tokenize(commands, arguments);
  if (!tokens.ok()) return tokens.status();
  Invocation invocation{.command = nullptr, .help = tokens->help, .flags = {}, .files = {}};
  std::vector<std::string>& words = tokens->words;
  if (!words.empty() && words.front() == "help") {
    invocation.help = true;
    words.erase(words.begin());
  }
  if (words.empty()) {
    if (invocation.help) return invocation;
    return absl::InvalidArgumentError("no command");
  }
  invocation.command = FindCommand(commands, words.front());
  if (invocation.command == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat("unknown command ", words.front()));
  }
  if (invocation.help) return invocation;
  if (auto status = SetFlags(*tokens, &invocation); !status.ok()) return status;
  for (const auto& [flag, other] :
       {std::pair{"tls-cert", "tls-ca"}, {"tls-cert", "tls-key"}, {"tls-key", "tls-cert"}}) {
    if (invocation.Given(flag) && !invocation.Given(other)) {
      return absl::InvalidArgumentError(absl::StrCat("--", flag, " needs --", other));
    }
  }
  invocation.files.assign(words.begin() + 1, words.end());
  const bool takes_files = invocation.command->files[0] != '\0';
  if (!takes_files && !invocation.files.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("unexpected argument ", invocation.files.front(), " of ", invocation.command->name));
  }
  if (takes_files && invocation.files.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(invocation.command->name, " needs ", invocation.command->files));
  }
  return invocation;
}

std::string Help(std::span<const Command> commands) {
  std::string text = "usage: summaryctl [--address=ADDRESS] COMMAND [FLAGS]\n\ncommands:\n";
  for (const Command& command : commands) {
    absl::StrAppendFormat(&text, "  %-14s %s\n", command.name, command.summary);
  }
  absl::StrAppend(&text, "\nflags of every command:\n", FlagsHelp(kCommonFlags),
                  "\n\"summaryctl help COMMAND\" tells a command's flags.\n");
  return text;
}

std::string Help(const Command& command) {
  std::string text =
      absl::StrCat("usage: summaryctl ", command.name, " [FLAGS]", command.files[0] == '\0' ? "" : " ",
                   command.files, "\n", command.summary, "\n\nflags:\n");
  absl::StrAppend(&text, FlagsHelp(command.flags), FlagsHelp(kCommonFlags));
  return text;
}

}  // namespace kvsummary
