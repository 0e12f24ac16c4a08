#include "client/tls_credentials.h"

#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace kvsummary {
namespace {

constexpr unsigned kRefreshSeconds = 5;

template <typename T, void (*kFree)(T*)>
struct Free {
  void operator()(T* object) const { kFree(object); }
};
void FreeBio(BIO* bio) { BIO_free(bio); }
using BioPtr = std::unique_ptr<BIO, Free<BIO, FreeBio>>;
using CertificatePtr = std::unique_ptr<X509, Free<X509, X509_free>>;
using KeyPtr = std::unique_ptr<EVP_PKEY, Free<EVP_PKEY, EVP_PKEY_free>>;

// A file under the name that errors call it by.
struct NamedFile {
  std::string_view name;
  const std::string& path;
  absl::Status Error(std::string_view what) const {
    return absl::InvalidArgumentError(absl::StrCat(std::string(name), "=", path, ": ", std::string(what)));
  }
};

absl::Status Open(const NamedFile& file, BioPtr& bio) {
  errno = 0;
  bio.reset(BIO_new_file(file.path.c_str(), "r"));
  if (bio != nullptr) return absl::OkStatus();
  const int error = errno;
  ERR_clear_error();
  return file.Error(absl::StrCat("cannot be read: ", std::strerror(error)));
}

// All are read; `first` is the first.
absl::Status ReadCertificates(const NamedFile& file, CertificatePtr& first) {
  BioPtr bio;
  if (auto s = Open(file, bio); !s.ok()) return s;
  int count = 0;
  while (CertificatePtr next{PEM_read_bio_X509(bio.get(), nullptr, nullptr, nullptr)}) {
    if (count++ == 0) first = std::move(next);
  }
  const bool at_end = ERR_GET_REASON(ERR_peek_last_error()) == PEM_R_NO_START_LINE;
  ERR_clear_error();
  if (!at_end) return file.Error(absl::StrCat("certificate ", count + 1, " in it is damaged"));
  return count > 0 ? absl::OkStatus() : file.Error("has no certificate in PEM");
}

absl::Status CheckKey(const NamedFile& file, const NamedFile& cert_file, X509* cert) {
  BioPtr bio;
  if (auto s = Open(file, bio); !s.ok()) return s;
  const auto no_password = [](char*, int, int, void*) { return -1; };  // instead of asking the terminal
  const KeyPtr key(PEM_read_bio_PrivateKey(bio.get(), nullptr, no_password, nullptr));
  const bool match = key != nullptr && X509_check_private_key(cert, key.get()) == 1;
  ERR_clear_error();
  if (key == nullptr) return file.Error("has no private key in PEM, or one that needs a password");
  if (!match) return file.Error(absl::StrCat("is not the key of the certificate in ", cert_file.path));
  return absl::OkStatus();
}

bool IsUnix(const std::string& address) { return absl::StartsWith(address, "unix:"); }

// What the options watch is what is given.
template <typename Options>
void Watch(const TlsFiles& files, Options& options) {
  if (!files.ca.empty()) options.watch_root_certs();
  if (!files.cert.empty()) options.watch_identity_key_cert_pairs();
}

std::shared_ptr<grpc::experimental::CertificateProviderInterface> Provide(const TlsFiles& files) {
  return std::make_shared<grpc::experimental::FileWatcherCertificateProvider>(files.key, files.cert, files.ca,
                                                                              kRefreshSeconds);
}

}  // namespace

absl::Status CheckTlsFiles(const TlsFiles& files, const TlsNames& names) {
  const NamedFile ca{names.ca, files.ca};
  const NamedFile cert{names.cert, files.cert};
  const NamedFile key{names.key, files.key};
  if (files.cert.empty() && !files.key.empty()) {
    return key.Error(absl::StrCat("needs ", std::string(names.cert)));
  }
  if (!files.cert.empty() && files.key.empty()) {
    return cert.Error(absl::StrCat("needs ", std::string(names.key)));
  }
  CertificatePtr first;
  if (!files.ca.empty()) {
    if (auto s = ReadCertificates(ca, first); !s.ok()) return s;
  }
  if (files.cert.empty()) return absl::OkStatus();
  if (auto s = ReadCertificates(cert, first); !s.ok()) return s;
  return CheckKey(key, cert, first.get());
}

bool CertificateNames(const std::string& cert_path, const std::string& host) {
  CertificatePtr cert;
  if (!ReadCertificates({"", cert_path}, cert).ok()) return false;
  return X509_check_ip_asc(cert.get(), host.c_str(), 0) == 1 ||
         X509_check_host(cert.get(), host.data(), host.size(), 0, nullptr) == 1;
}

std::shared_ptr<grpc::ChannelCredentials> TcpCredentials(const TlsFiles& files) {
  if (files.ca.empty()) return grpc::InsecureChannelCredentials();
  grpc::experimental::TlsChannelCredentialsOptions options;  // checks the host's name by itself
  options.set_certificate_provider(Provide(files));
  Watch(files, options);
  return grpc::experimental::TlsCredentials(options);
}

std::shared_ptr<grpc::ChannelCredentials> CredentialsFor(
    const std::string& address, const std::shared_ptr<grpc::ChannelCredentials>& tcp) {
  return IsUnix(address) ? grpc::InsecureChannelCredentials() : tcp;
}

std::string HowDialled(const std::string& address, const TlsFiles& files) {
  if (IsUnix(address)) return "";
  if (files.ca.empty()) return " without TLS";
  return files.cert.empty() ? " with TLS but no certificate of this side" : " with TLS";
}

std::shared_ptr<grpc::ServerCredentials> ListenCredentials(const TlsFiles& files) {
  if (files.cert.empty()) return grpc::InsecureServerCredentials();
  grpc::experimental::TlsServerCredentialsOptions options(Provide(files));
  Watch(files, options);
  options.set_cert_request_type(files.ca.empty()
                                    ? GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE
                                    : GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  return grpc::experimental::TlsServerCredentials(options);
}

}  // namespace kvsummary
