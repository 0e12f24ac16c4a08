#include "client/command_line.h"

#include <cstdlib>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace kvsummary {
namespace {

int Nothing(const Invocation&) { return 0; }

const std::vector<Command>& Commands() {
  static const std::vector<Command> commands{
      {"make",
       "",
       "Makes.",
       {{"name", "NAME", nullptr, "its name"},
        {"count", "N", "3", "how many", CheckInt32},
        {"size", "SIZE", "0", "how large", CheckBytes},
        {"blocks", "LIST", "", "which", CheckList},
        {"layers", "FIRST:COUNT", "", "where", CheckLayers},
        {"json", nullptr, "", "as JSON"}},
       Nothing},
      {"run", "FILE...", "Runs.", {}, Nothing},
  };
  return commands;
}

Invocation Parse(const std::vector<std::string>& arguments) {
  auto invocation = ParseCommandLine(Commands(), arguments);
  EXPECT_TRUE(invocation.ok()) << invocation.status();
  return invocation.ok() ? *std::move(invocation) : Invocation();
}

std::string Error(const std::vector<std::string>& arguments) {
  const auto status = ParseCommandLine(Commands(), arguments).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  return std::string(status.message());
}

TEST(ParseCommandLine, TakesFlagsBeforeAndAfterTheCommandInBothForms) {
  for (const auto& arguments : std::vector<std::vector<std::string>>{
           {"--address=a:1", "--json", "make", "--name=x", "--count=5"},
           {"--address", "a:1", "--name", "x", "--json", "make", "--count", "5"},
           {"make", "--count", "5", "--name", "x", "--address", "a:1", "--json"}}) {
    const Invocation invocation = Parse(arguments);
    ASSERT_EQ(invocation.command, &Commands()[0]);
    EXPECT_EQ(invocation.Address(), "a:1");
    EXPECT_EQ(invocation.Text("name"), "x");
    EXPECT_EQ(invocation.Int32("count"), 5);
    EXPECT_TRUE(invocation.On("json"));
  }
}

TEST(ParseCommandLine, EveryCommandTakesTls) {
  const TlsFiles tls = Parse({"run", "f", "--tls-key=k", "--tls-ca=a", "--tls-cert=c"}).Tls();
  EXPECT_EQ(tls.ca, "a");
  EXPECT_EQ(tls.cert, "c");
  EXPECT_EQ(tls.key, "k");
  EXPECT_EQ(Parse({"run", "f"}).Tls().ca, "");
  EXPECT_EQ(Error({"run", "f", "--tls-cert=c", "--tls-key=k"}), "--tls-cert needs --tls-ca");
  EXPECT_EQ(Error({"run", "f", "--tls-ca=a", "--tls-cert=c"}), "--tls-cert needs --tls-key");
  EXPECT_EQ(Error({"run", "f", "--tls-ca=a", "--tls-key=k"}), "--tls-key needs --tls-cert");
}

TEST(ParseCommandLine, FillsInWhatIsNotGiven) {
  const Invocation invocation = Parse({"make", "--name=x"});
  EXPECT_EQ(invocation.Int32("count"), 3);
  EXPECT_EQ(invocation.Bytes("size"), 0);
  EXPECT_FALSE(invocation.Given("blocks"));
  EXPECT_FALSE(invocation.On("json"));
}

TEST(ParseCommandLine, ReadsSizesListsAndLayers) {
  const Invocation invocation =
      Parse({"make", "--name=x", "--size=8GiB", "--blocks=1,4-7,2", "--layers=3:2"});
  EXPECT_EQ(invocation.Bytes("size"), std::int64_t{8} << 30);
  EXPECT_EQ(invocation.List("blocks"), (std::vector<std::int64_t>{1, 4, 5, 6, 7, 2}));
  EXPECT_EQ(invocation.Layers("layers").first, 3);
  EXPECT_EQ(invocation.Layers("layers").count, 2);
}

TEST(ParseCommandLine, TakesFilesAlsoBehindTwoDashes) {
  EXPECT_EQ(Parse({"run", "a", "b"}).files, (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(Parse({"run", "--", "--address"}).files, (std::vector<std::string>{"--address"}));
}

TEST(ParseCommandLine, AsksForHelp) {
  EXPECT_EQ(Parse({"--help"}).command, nullptr);
  EXPECT_EQ(Parse({"help"}).command, nullptr);
  for (const auto& arguments : std::vector<std::vector<std::string>>{
           {"help", "make"}, {"make", "--help"}, {"--help", "make"}, {"make", "-h"}}) {
    const Invocation invocation = Parse(arguments);
    EXPECT_TRUE(invocation.help);
    EXPECT_EQ(invocation.command, &Commands()[0]);
  }
  EXPECT_NE(Help(Commands()[0]).find("--count=N"), std::string::npos);
  EXPECT_NE(Help(Commands()).find("run"), std::string::npos);
}

TEST(ParseCommandLine, NamesWhatIsWrong) {
  EXPECT_EQ(Error({}), "no command");
  EXPECT_EQ(Error({"mke"}), "unknown command mke");
  EXPECT_EQ(Error({"make"}), "make needs --name");
  EXPECT_EQ(Error({"make", "--name"}), "--name needs a value");
  EXPECT_EQ(Error({"make", "--name="}), "--name needs a value");
  EXPECT_EQ(Error({"make", "--name=x", "--name=y"}), "--name is given twice");
  EXPECT_EQ(Error({"make", "--name=x", "--json=yes"}), "--json takes no value");
  EXPECT_EQ(Error({"make", "--name=x", "y"}), "unexpected argument y of make");
  EXPECT_EQ(Error({"make", "-n", "x"}), "unknown flag -n; flags begin with --");
  EXPECT_EQ(Error({"make", "--name=x", "--nme=y"}),
            "make has no flag --nme; it has --address --tls-ca --tls-cert --tls-key --name --count --size "
            "--blocks --layers --json");
  EXPECT_EQ(Error({"run"}), "run needs FILE...");
}

TEST(ParseCommandLine, RefusesMalformedValues) {
  for (const char* flag :
       {"--count=", "--count=x", "--count=3000000000", "--count=1.5", "--size=8X", "--size=-1", "--blocks=a",
        "--blocks=", "--blocks=1,,2", "--blocks=3-1", "--blocks=1-2-3", "--blocks=-1", "--blocks=0-99999999",
        "--layers=1", "--layers=1:", "--layers=1:2:3", "--layers=a:1"}) {
    const std::string text = Error({"make", "--name=x", flag});
    EXPECT_EQ(text.rfind(std::string(flag).substr(0, std::string(flag).find('=')), 0), 0) << text;
  }
}

TEST(Invocation, AddressComesFromTheFlagThenTheEnvironmentThenTheDefault) {
  unsetenv("SUMMARYD_ADDRESS");
  EXPECT_EQ(Parse({"make", "--name=x"}).Address(), "unix:/run/summaryd/summaryd.sock");
  setenv("SUMMARYD_ADDRESS", "host:2", 1);
  EXPECT_EQ(Parse({"make", "--name=x"}).Address(), "host:2");
  EXPECT_EQ(Parse({"make", "--name=x", "--address=host:3"}).Address(), "host:3");
  unsetenv("SUMMARYD_ADDRESS");
}

}  // namespace
}  // namespace kvsummary
