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
  const auto config = Parse({"--listen=unix:/a",
                             "--listen",
                             ":0",
                             "--host-bytes",
                             "8GiB",
                             "--device-bytes=1MiB",
                             "--drain-timeout=0",
                             "--log-level=off",
                             "--descriptor-socket=/d",
                             "--socket-mode=0660",
                             "--socket-group=12",
                             "--cache-grace=5",
                             "--host-store-bytes=1GiB",
                             "--gpu-store-bytes",
                             "2GiB",
                             "--store-policy=s3fifo",
                             "--namespace-quota-bytes=3MiB",
                             "--max-lease=7",
                             "--advertise=h:1",
                             "--tls-cert=/c",
                             "--tls-key",
                             "/k",
                             "--tls-client-ca=/a",
                             "--tls-peer-ca=/p"});
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
  EXPECT_EQ(config->host_store_bytes, std::int64_t{1} << 30);
  EXPECT_EQ(config->gpu_store_bytes, std::int64_t{2} << 30);
  EXPECT_TRUE(config->s3fifo);
  EXPECT_EQ(config->namespace_quota_bytes, 3 << 20);
  EXPECT_EQ(config->max_lease.count(), 7);
  EXPECT_EQ(config->advertise, "h:1");
  EXPECT_EQ(config->tls_cert, "/c");
  EXPECT_EQ(config->tls_key, "/k");
  EXPECT_EQ(config->tls_client_ca, "/a");
  EXPECT_EQ(config->tls_peer_ca, "/p");
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
           {{"--host-store-bytes=-1"}, "--host-store-bytes"},
           {{"--gpu-store-bytes=x"}, "--gpu-store-bytes"},
           {{"--store-policy=random"}, "--store-policy"},
           {{"--namespace-quota-bytes=-2"}, "--namespace-quota-bytes"},
           {{"--max-lease=0"}, "--max-lease"},
           {{"--advertise="}, "--advertise"},
           {{"--advertise=host"}, "--advertise"},
           {{"--advertise=host:0"}, "--advertise"},
           {{"--advertise=0.0.0.0:50051"}, "--advertise"},
           {{"--advertise=[::]:50051"}, "--advertise"},
           {{"--advertise=unix:s"}, "--advertise"},
           {{"--tls-cert="}, "--tls-cert"},
           {{"--log-level=loud"}, "--log-level"}}) {
    const auto config = Parse(arguments);
    ASSERT_FALSE(config.ok()) << flag;
    EXPECT_EQ(config.status().message().find(flag), 0u) << config.status();
  }
}

}  // namespace
}  // namespace kvsummary
