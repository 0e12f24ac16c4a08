// TLS of a daemon's clients, and between daemons.
#include <fstream>

#include "client/tls_credentials.h"
#include "server/rpc/handoff_test_fixture.h"
#include "tests/tls/certificates.h"

namespace kvsummary {
namespace {

constexpr CacheGeometry kGeometry = {.layers = 3,
                                     .blocks = 6,
                                     .block_size = 64,
                                     .block_stride = 0,
                                     .ring_blocks = 2,
                                     .capacity = 16,
                                     .rows_per_layer = 16,
                                     .k = 0};
constexpr std::int64_t kTokens = 4 * 64 + 5;
const PlacedRequest kRequest = {{5, 4, 3, 2, 1}, 1};

class TlsTest : public HandoffRpcTest {
 protected:
  using Tls = Server::Options::Tls;

  void SetUp() override { ASSERT_TRUE(MakeCertificates(dir_)); }

  std::string Pem(const std::string& name) const { return dir_ + "/" + name + ".pem"; }
  std::string Key(const std::string& name) const { return dir_ + "/" + name + ".key"; }
  Tls Mutual(const std::string& name) const {
    return {.cert = Pem(name), .key = Key(name), .client_ca = Pem("ca"), .peer_ca = ""};
  }
  // On TCP, beside the Unix socket; hand-offs name the TCP address.
  Daemon StartOnTcp(const std::string& name, const Tls& tls, const std::string& listen = "127.0.0.1:0") {
    Server::Options options;
    options.tls = tls;
    options.listen = {listen};
    EXPECT_TRUE(options.peers.Allow("127.0.0.1").ok());
    EXPECT_TRUE(options.peers.Allow("0.0.0.0").ok());
    return Start(name, options);
  }
  static std::shared_ptr<grpc::Channel> Dial(const std::string& address, const TlsFiles& tls) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 60'000);  // what an attempt may take
    return grpc::CreateCustomChannel(address, CredentialsFor(address, TcpCredentials(tls)), arguments);
  }
  static grpc::Status Ask(const std::shared_ptr<grpc::Channel>& channel) {
    grpc::ClientContext context;
    v1::GetConfigResponse reply;
    return v1::AdminService::NewStub(channel)->GetConfig(&context, {}, &reply);
  }
  // "" or why the first attempt to connect fails.
  static std::string Connected(const std::string& address, const TlsFiles& tls) {
    const auto channel = Dial(address, tls);
    for (auto state = channel->GetState(true);
         state != GRPC_CHANNEL_READY && state != GRPC_CHANNEL_TRANSIENT_FAILURE;
         state = channel->GetState(true)) {
      channel->WaitForStateChange(state, std::chrono::system_clock::now() + std::chrono::minutes(1));
    }
    return Ask(channel).error_message();
  }
  // "" or what is wrong, named as a flag.
  std::string Refused(const Tls& tls, const std::string& peer = "") {
    std::vector<std::unique_ptr<Device>> devices;
    devices.push_back(MakeHostDevice(HostKernels(), 1 << 20));
    CacheManager caches(std::move(devices), 1);
    Server::Options options;
    options.tls = tls;
    options.listen = {"127.0.0.1:0"};
    if (!peer.empty()) {
      EXPECT_TRUE(options.peers.Allow(peer).ok());
    }
    const auto server = Server::Start(options, caches);
    EXPECT_TRUE(server.ok() || absl::IsInvalidArgument(server.status())) << server.status();
    return std::string(server.status().message());
  }
  // Offers at the source and accepts at the target.
  grpc::Status HandOver(v1::AcceptResponse* reply) {
    from_ = source_.MakeCache("from", kGeometry);
    to_ = target_.MakeCache("to", kGeometry);
    Fill(*from_, kRequest, kTokens / 8, kTokens - 1);
    const auto offer = MustOffer(OfferRequestOf(*from_, kRequest, kTokens));
    return Accept(AcceptRequestOf(offer.handoff(), *to_, kRequest, kTokens), reply);
  }
  bool Untouched() const {
    const std::string bytes = BytesOf(*to_);
    return bytes == std::string(bytes.size(), static_cast<char>(kUntouched));
  }

  std::shared_ptr<Cache> from_;
  std::shared_ptr<Cache> to_;
};

TEST_F(TlsTest, ClientsNeedTheRightCertificates) {
  source_ = StartOnTcp("source", Mutual("daemon"));
  const std::string address = source_.server->addresses()[0];
  const TlsFiles good{.ca = Pem("ca"), .cert = Pem("client"), .key = Key("client")};
  EXPECT_EQ(Connected(address, good), "");
  EXPECT_NE(Connected(address, {}), "");
  EXPECT_NE(Connected(address, {.ca = Pem("ca")}), "");
  EXPECT_NE(Connected(address, {.ca = Pem("other_ca"), .cert = good.cert, .key = good.key})
                .find("certificate verify failed"),
            std::string::npos);
  EXPECT_NE(Connected(address, {.ca = Pem("ca"), .cert = Pem("stranger"), .key = Key("stranger")}), "");
  target_ = StartOnTcp("target", Mutual("elsewhere"));
  EXPECT_NE(Connected(target_.server->addresses()[0], good).find("Hostname Verification Check"),
            std::string::npos);
}

TEST_F(TlsTest, WithoutAClientCaTheDaemonAloneShowsACertificate) {
  source_ = StartOnTcp("source",
                       {.cert = Pem("daemon"), .key = Key("daemon"), .client_ca = "", .peer_ca = Pem("ca")});
  EXPECT_EQ(Connected(source_.server->addresses()[0], {.ca = Pem("ca")}), "");
  EXPECT_NE(Connected(source_.server->addresses()[0], {}), "");
}

TEST_F(TlsTest, UnixSocketsArePlain) {
  source_ = StartOnTcp("source", Mutual("daemon"));
  EXPECT_EQ(Connected(Address("source"), {}), "");
  EXPECT_EQ(Connected(Address("source"), {.ca = Pem("ca"), .cert = Pem("client"), .key = Key("client")}), "");
}

TEST_F(TlsTest, AClientOfTlsDoesNotFallBackToAPlainPort) {
  source_ = StartOnTcp("source", {});
  EXPECT_EQ(Connected(source_.server->addresses()[0], {}), "");
  EXPECT_NE(Connected(source_.server->addresses()[0], {.ca = Pem("ca")}), "");
}

TEST_F(TlsTest, SettingsThatMakeNoSenseAreNamed) {
  EXPECT_EQ(Refused(Mutual("daemon"), "127.0.0.1"), "");
  EXPECT_EQ(Refused({.cert = Pem("daemon"), .key = "", .client_ca = "", .peer_ca = ""}),
            "--tls-cert=" + Pem("daemon") + ": needs --tls-key");
  EXPECT_EQ(Refused({.cert = "", .key = Key("daemon"), .client_ca = "", .peer_ca = ""}),
            "--tls-key=" + Key("daemon") + ": needs --tls-cert");
  EXPECT_EQ(Refused({.cert = "", .key = "", .client_ca = Pem("ca"), .peer_ca = ""}),
            "--tls-client-ca=" + Pem("ca") + ": needs --tls-cert and --tls-key");
  EXPECT_EQ(Refused({.cert = Pem("daemon"), .key = Key("client"), .client_ca = "", .peer_ca = ""}),
            "--tls-key=" + Key("client") + ": is not the key of the certificate in " + Pem("daemon"));
  EXPECT_EQ(Refused({.cert = "", .key = "", .client_ca = "", .peer_ca = dir_ + "/none"}),
            "--tls-peer-ca=" + dir_ + "/none: cannot be read: No such file or directory");
  const Tls no_ca{.cert = Pem("daemon"), .key = Key("daemon"), .client_ca = "", .peer_ca = ""};
  EXPECT_EQ(Refused(no_ca, "unix:/run/s"), "");
  EXPECT_NE(Refused(no_ca, "10.0.0.0/8").find("--tls-peer-ca"), std::string::npos);
}

TEST_F(TlsTest, ARenewedCertificateIsTakenUp) {
  const std::string link = dir_ + "/live";
  const auto point_to = [&](const std::string& name) {  // both files at once
    const std::string folder = dir_ + "/of-" + name;
    std::filesystem::create_directory(folder);
    std::filesystem::copy(Pem(name), folder + "/cert");
    std::filesystem::copy(Key(name), folder + "/key");
    std::filesystem::create_symlink(folder, link + ".new");
    std::filesystem::rename(link + ".new", link);
  };
  point_to("daemon");
  source_ = StartOnTcp("source",
                       {.cert = link + "/cert", .key = link + "/key", .client_ca = "", .peer_ca = Pem("ca")});
  const std::string address = source_.server->addresses()[0];
  const auto before = Dial(address, {.ca = Pem("ca")});
  ASSERT_TRUE(Ask(before).ok());
  ASSERT_NE(Connected(address, {.ca = Pem("other_ca")}), "");
  point_to("stranger");
  while (!Connected(address, {.ca = Pem("other_ca")}).empty()) {
  }
  EXPECT_NE(Connected(address, {.ca = Pem("ca")}), "");
  EXPECT_TRUE(Ask(before).ok()) << "a connection that stands goes on";
}

TEST_F(TlsTest, HandOffsTravelByTls) {
  source_ = StartOnTcp("source", Mutual("daemon"));
  target_ = StartOnTcp("target", Mutual("client"));
  v1::AcceptResponse reply;
  const auto status = HandOver(&reply);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(reply.transport(), v1::HANDOFF_TRANSPORT_GRPC);
  EXPECT_TRUE(BytesOf(*to_) == Expected(*to_, kRequest, kTokens));
  while (source_.Stats().completed() == 0) std::this_thread::yield();  // told after the client
}

TEST_F(TlsTest, ADaemonThatOnlyPullsNeedsNoMoreThanACa) {
  source_ = StartOnTcp("source",
                       {.cert = Pem("daemon"), .key = Key("daemon"), .client_ca = "", .peer_ca = Pem("ca")});
  target_ = StartOnTcp("target", {.cert = "", .key = "", .client_ca = "", .peer_ca = Pem("ca")});
  v1::AcceptResponse reply;
  const auto status = HandOver(&reply);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_TRUE(BytesOf(*to_) == Expected(*to_, kRequest, kTokens));
}

TEST_F(TlsTest, ADaemonThatIsNotWhoItShouldBeIsNotPulledFrom) {
  struct Case {
    Tls source, target;
    std::string why;
  };
  Tls other_peers = Mutual("daemon");
  other_peers.peer_ca = Pem("other_ca");
  Tls believes_others = Mutual("client");
  believes_others.client_ca = Pem("other_ca");
  believes_others.peer_ca = Pem("ca");
  Tls strange = Mutual("stranger");
  strange.client_ca = Pem("ca");
  give_up_ = std::chrono::milliseconds(500);
  for (const Case& c :
       {Case{strange, Mutual("client"), "certificate verify failed"},          // another CA's
        Case{Mutual("elsewhere"), Mutual("client"), "Hostname Verification"},  // another host's
        Case{Mutual("daemon"), other_peers, "certificate verify failed"},      // another CA asked for
        Case{believes_others, Mutual("client"), "with TLS"},                   // refuses the target
        Case{Mutual("daemon"), {}, "without TLS"}, Case{{}, Mutual("client"), "with TLS"}}) {
    SCOPED_TRACE(c.why);
    source_ = StartOnTcp("source", c.source);
    target_ = StartOnTcp("target", c.target);
    v1::AcceptResponse reply;
    const auto status = HandOver(&reply);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
    EXPECT_EQ(ReasonOf(status), "PEER_UNREACHABLE");
    EXPECT_NE(status.error_message().find(c.why), std::string::npos) << status.error_message();
    EXPECT_TRUE(Untouched());
    EXPECT_EQ(source_.Stats().offers(), 1) << "it can still be accepted";
    from_.reset();
    to_.reset();
    for (Daemon* daemon : {&target_, &source_}) {
      daemon->client.reset();
      daemon->server.reset();
      daemon->caches.reset();
    }
  }
}

TEST_F(TlsTest, ADaemonOnEveryInterfaceDoesNotSayThatItIsReachedThere) {
  source_ = StartOnTcp("source", {}, "0.0.0.0:0");
  target_ = StartOnTcp("target", {});
  v1::AcceptResponse reply;
  const auto status = HandOver(&reply);
  EXPECT_EQ(ReasonOf(status), "PEER_UNREACHABLE");
  EXPECT_NE(status.error_message().find("--advertise"), std::string::npos) << status.error_message();
  EXPECT_TRUE(Untouched());
}

}  // namespace
}  // namespace kvsummary
