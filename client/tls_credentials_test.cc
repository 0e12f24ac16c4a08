#include "client/tls_credentials.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

#include "tests/tls/certificates.h"

namespace kvsummary {
namespace {

class TlsCredentialsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_NE(mkdtemp(dir_.data()), nullptr);
    ASSERT_TRUE(MakeCertificates(dir_));
  }
  ~TlsCredentialsTest() override { std::filesystem::remove_all(dir_); }

  std::string Path(const std::string& name) const { return dir_ + "/" + name; }
  std::string Read(const std::string& name) const {
    std::ifstream file(Path(name), std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  // A file with this text.
  std::string Write(const std::string& name, const std::string& text) const {
    std::ofstream(Path(name), std::ios::binary) << text;
    return Path(name);
  }
  TlsFiles Good() const {
    return {.ca = Path("ca.pem"), .cert = Path("daemon.pem"), .key = Path("daemon.key")};
  }
  static std::string Error(const TlsFiles& files) {
    const auto status = CheckTlsFiles(files, {"--ca", "--cert", "--key"});
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  }

  std::string dir_ = "/tmp/kvs-XXXXXX";
};

TEST_F(TlsCredentialsTest, WhatBelongsTogetherIsTaken) {
  const TlsNames names{"--ca", "--cert", "--key"};
  EXPECT_TRUE(CheckTlsFiles({}, names).ok());
  EXPECT_TRUE(CheckTlsFiles({.ca = Path("ca.pem")}, names).ok());
  EXPECT_TRUE(CheckTlsFiles(Good(), names).ok());
  TlsFiles files = Good();
  files.ca = Write("both", Read("ca.pem") + Read("other_ca.pem"));
  files.cert = Write("chain", "a comment\n" + Read("daemon.pem") + Read("ca.pem"));
  EXPECT_TRUE(CheckTlsFiles(files, names).ok());
}

TEST_F(TlsCredentialsTest, OneOfAPairIsRefused) {
  EXPECT_EQ(Error({.cert = Path("daemon.pem")}), "--cert=" + Path("daemon.pem") + ": needs --key");
  EXPECT_EQ(Error({.key = Path("daemon.key")}), "--key=" + Path("daemon.key") + ": needs --cert");
}

TEST_F(TlsCredentialsTest, WhatCannotBeUsedIsNamed) {
  const std::string half = Read("ca.pem").substr(0, 200);
  const std::string garbled = [this] {
    std::string text = Read("ca.pem");
    text.replace(60, 20, std::string(20, 'A'));
    return text;
  }();
  for (const auto& [file, why] : std::vector<std::pair<std::string, std::string>>{
           {Path("none"), "cannot be read: No such file or directory"},
           {dir_, "has no certificate in PEM"},
           {Write("empty", ""), "has no certificate in PEM"},
           {Write("garbage", std::string(5000, '\x80')), "has no certificate in PEM"},
           {Path("ca.key"), "has no certificate in PEM"},
           {Write("half", half), "certificate 1 in it is damaged"},
           {Write("garbled", garbled), "certificate 1 in it is damaged"},
           {Write("second", Read("ca.pem") + half), "certificate 2 in it is damaged"}}) {
    TlsFiles files = Good();
    files.ca = file;
    EXPECT_EQ(Error(files), "--ca=" + file + ": " + why);
    files = Good();
    files.cert = file;
    EXPECT_EQ(Error(files), "--cert=" + file + ": " + why);
  }
}

TEST_F(TlsCredentialsTest, KeysThatCannotBeUsedAreNamed) {
  ASSERT_EQ(std::system(("openssl pkcs8 -topk8 -passout pass:x -in " + Path("daemon.key") + " -out " +
                         Path("locked") + " 2> /dev/null")
                            .c_str()),
            0);
  const std::string none = "has no private key in PEM, or one that needs a password";
  for (const auto& [file, why] : std::vector<std::pair<std::string, std::string>>{
           {Path("none"), "cannot be read: No such file or directory"},
           {Write("empty", ""), none},
           {Path("daemon.pem"), none},
           {Path("locked"), none},
           {Path("client.key"), "is not the key of the certificate in " + Path("daemon.pem")}}) {
    TlsFiles files = Good();
    files.key = file;
    EXPECT_EQ(Error(files), "--key=" + file + ": " + why);
  }
}

TEST_F(TlsCredentialsTest, ErrorsSayHowADaemonIsDialled) {
  EXPECT_EQ(HowDialled("unix:/s", Good()), "");
  EXPECT_EQ(HowDialled("h:1", {}), " without TLS");
  EXPECT_EQ(HowDialled("h:1", {.ca = "a"}), " with TLS but no certificate of this side");
  EXPECT_EQ(HowDialled("h:1", Good()), " with TLS");
}

TEST_F(TlsCredentialsTest, ACertificateIsForItsHosts) {
  EXPECT_TRUE(CertificateNames(Path("daemon.pem"), "127.0.0.1"));
  EXPECT_FALSE(CertificateNames(Path("daemon.pem"), "127.0.0.2"));
  EXPECT_FALSE(CertificateNames(Path("daemon.pem"), "daemon.example"));
  EXPECT_TRUE(CertificateNames(Path("elsewhere.pem"), "elsewhere"));
}

}  // namespace
}  // namespace kvsummary
