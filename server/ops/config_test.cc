#include "server/ops/config.h"

#include <gtest/gtest.h>

#include <vector>

namespace kvsummary {
namespace {

absl::StatusOr<Config> Parse(std::vector<const char*> arguments) { return ParseConfig(arguments); }

TEST(Config, Defaults) {
  const auto config = Parse({});
  ASSERT_TRUE(config.ok());
  EXPECT_EQ(config->listen, std::vector<std::string>{"unix:/run/summaryd/summaryd.sock"});
  EXPECT_EQ(config->host_bytes, 0);
}

TEST(Config, ValuesInBothForms) {
  const auto config =
      Parse({"--listen=unix:/a", "--listen", ":0", "--host-bytes", "8GiB", "--device-bytes=1MiB",
             "--drain-timeout=0", "--log-level=off", "--descriptor-socket=/d", "--socket-mode=0660",
             "--socket-group=12", "--cache-grace=5"});
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->listen, (std::vector<std::string>{"unix:/a", ":0"}));
  EXPECT_EQ(config->host_bytes, std::int64_t{8} << 30);
  EXPECT_EQ(config->device_bytes, 1 << 20);
  EXPECT_EQ(config->drain_timeout.count(), 0);
  EXPECT_EQ(config->log_level, "off");
  EXPECT_EQ(config->descriptor_socket, "/d");
  EXPECT_EQ(config->socket_mode, 0660u);
  EXPECT_EQ(config->socket_group, gid_t{12});
  EXPECT_EQ(config->cache_grace.count(), 5);
}

TEST(Config, AGroupMayBeNamed) {
  const auto config = Parse({"--socket-group=root"});
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->socket_group, gid_t{0});
}

TEST(Config, RefusalsNameTheFlag) {
  for (const auto& [arguments, flag] : std::vector<std::pair<std::vector<const char*>, const char*>>{
           {{"--nope=1"}, "--nope"},
           {{"--listen"}, "--listen"},
           {{"stray"}, "stray"},
           {{"--host-bytes=lots"}, "--host-bytes"},
           {{"--host-bytes=0"}, "--host-bytes"},
           {{"--device-bytes=-1"}, "--device-bytes"},
           {{"--drain-timeout=-1"}, "--drain-timeout"},
           {{"--cache-grace=soon"}, "--cache-grace"},
           {{"--descriptor-socket="}, "--descriptor-socket"},
           {{"--socket-mode=0777"}, "--socket-mode"},
           {{"--socket-mode=060"}, "--socket-mode"},
           {{"--socket-mode=rw"}, "--socket-mode"},
           {{"--socket-group=no such group"}, "--socket-group"},
           {{"--log-level=loud"}, "--log-level"}}) {
    const auto config = Parse(arguments);
    ASSERT_FALSE(config.ok()) << flag;
    EXPECT_EQ(config.status().message().find(flag), 0u) << config.status();
  }
}

}  // namespace
}  // namespace kvsummary
