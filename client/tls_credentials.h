// What gRPC needs for TLS, made from files.
//
// The files are looked at again every few seconds: connections made after that use what is in them then,
// those that stand go on. While a certificate and its key do not belong together, or cannot be used at all,
// no new connection comes about: replace both at once, as by a link to their folder.
#pragma once

#include <grpcpp/security/credentials.h>
#include <grpcpp/security/server_credentials.h>

#include <memory>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "client/tls.h"

namespace kvsummary {

// What an attempt to connect over TLS may take, in milliseconds: the handshake is several round trips, and
// work at both ends.
inline constexpr int kTlsConnectMs = 3000;

// What errors call the files, as "--tls-ca".
struct TlsNames {
  std::string_view ca, cert, key;
};

// INVALID_ARGUMENT, with the name and the path: a certificate without a key or the other way round, a file
// that cannot be read, has no PEM of its kind or damaged ones, or a key of another certificate.
absl::Status CheckTlsFiles(const TlsFiles& files, const TlsNames& names);

// Whether a certificate is for a host, which is a name or an address. The file has been checked.
bool CertificateNames(const std::string& cert_path, const std::string& host);

// For connections over TCP: without TLS where `ca` is empty. With it the daemon's certificate must be signed
// by `ca` and name the host of the address; `cert`, where given, is this side's. grpc_init has been called.
std::shared_ptr<grpc::ChannelCredentials> TcpCredentials(const TlsFiles& files);
// `tcp`, or what Unix sockets get.
std::shared_ptr<grpc::ChannelCredentials> CredentialsFor(
    const std::string& address, const std::shared_ptr<grpc::ChannelCredentials>& tcp);
// For errors: " with TLS" and the like, or nothing for a Unix socket.
std::string HowDialled(const std::string& address, const TlsFiles& files);

// Without TLS where `cert` is empty. With `ca`, clients without a certificate that it signed are refused.
std::shared_ptr<grpc::ServerCredentials> ListenCredentials(const TlsFiles& files);

}  // namespace kvsummary
