#include "client/raw_transfer.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/status.h"
#include "client/ucx_perftest.h"
#include "kvsummary/v1/handoff.grpc.pb.h"

namespace kvsummary {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::int64_t kChunkBytes = 1 << 20;  // as hand-offs'
constexpr std::int64_t kUcxMessages = 500;

double Seconds(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

class RawCopy final : public RawTransfer {
 public:
  // Both places are written once, so that every page is there.
  explicit RawCopy(std::int64_t bytes)
      : from_(static_cast<std::size_t>(bytes), 1), to_(static_cast<std::size_t>(bytes), 2) {}

  std::string name() const override { return "memcpy"; }
  absl::StatusOr<double> Move(std::int64_t bytes) override {
    const auto start = Clock::now();
    std::memcpy(to_.data(), from_.data(), std::min(from_.size(), static_cast<std::size_t>(bytes)));
    return Seconds(start);
  }

 private:
  const std::vector<char> from_;
  std::vector<char> to_;
};

// Sends as many zeros as the client gives credit for.
class ZeroStream final : public grpc::ServerBidiReactor<v1::PullRequest, v1::PullResponse> {
 public:
  ZeroStream() {
    response_.mutable_chunk()->mutable_data()->resize(kChunkBytes);
    StartRead(&request_);
  }
  void OnReadDone(bool ok) override {
    if (!ok) return Finish(grpc::Status::OK);
    left_ += request_.credit().bytes();
    Continue();
  }
  void OnWriteDone(bool ok) override {
    if (!ok) return Finish(grpc::Status::CANCELLED);
    Continue();
  }
  void OnDone() override { delete this; }

 private:
  void Continue() {
    if (left_ <= 0) return StartRead(&request_);
    const std::int64_t bytes = std::min(left_, kChunkBytes);
    response_.mutable_chunk()->mutable_data()->resize(static_cast<std::size_t>(bytes));
    left_ -= bytes;
    StartWrite(&response_);
  }

  v1::PullRequest request_;
  v1::PullResponse response_;
  std::int64_t left_ = 0;
};

class ZeroService final : public v1::HandoffService::CallbackService {
 public:
  grpc::ServerBidiReactor<v1::PullRequest, v1::PullResponse>* Pull(grpc::CallbackServerContext*) override {
    return new ZeroStream;
  }
};

// The folder of a Unix socket; removed with it.
class Folder {
 public:
  Folder() = default;
  ~Folder() {
    std::error_code ignored;
    if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  absl::Status Make() {
    char path[] = "/tmp/kvs-XXXXXX";
    if (mkdtemp(path) == nullptr) {
      return absl::UnavailableError(absl::StrCat("cannot make ", path, ": ", std::strerror(errno)));
    }
    path_ = path;
    return absl::OkStatus();
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

class RawStream final : public RawTransfer {
 public:
  explicit RawStream(bool unix_socket) : unix_socket_(unix_socket) {}
  ~RawStream() override {
    if (stream_ != nullptr) {
      context_.TryCancel();
      stream_->Finish();  // cancelled
    }
    if (server_ != nullptr) server_->Shutdown();
  }

  absl::Status Open() {
    std::string address = "127.0.0.1:0";
    if (unix_socket_) {
      if (auto status = folder_.Make(); !status.ok()) return status;
      address = absl::StrCat("unix:", folder_.path(), "/s");
    }
    int port = 0;
    grpc::ServerBuilder builder;
    builder.AddListeningPort(address, grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(&service_);
    server_ = builder.BuildAndStart();
    if (server_ == nullptr) return absl::UnavailableError(absl::StrCat("cannot listen on ", address));
    if (!unix_socket_) address = absl::StrCat("127.0.0.1:", port);
    stub_ = v1::HandoffService::NewStub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
    stream_ = stub_->Pull(&context_);
    return absl::OkStatus();
  }

  std::string name() const override {
    return unix_socket_ ? "gRPC stream, Unix socket" : "gRPC stream, loopback TCP";
  }
  absl::StatusOr<double> Move(std::int64_t bytes) override {
    const auto start = Clock::now();
    v1::PullRequest request;
    request.mutable_credit()->set_bytes(bytes);
    bool open = stream_->Write(request);
    for (std::int64_t came = 0; open && came < bytes;) {
      open = stream_->Read(&response_);
      came += static_cast<std::int64_t>(response_.chunk().data().size());
    }
    if (open) return Seconds(start);
    const absl::Status status = FromGrpc(stream_->Finish());
    stream_.reset();
    return absl::UnavailableError(absl::StrCat("the stream of zeros has ended: ", status.message()));
  }

 private:
  const bool unix_socket_;
  Folder folder_;
  ZeroService service_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<v1::HandoffService::Stub> stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::PullRequest, v1::PullResponse>> stream_;
  v1::PullResponse response_;
};

class RawUcx final : public RawTransfer {
 public:
  std::string name() const override { return "ucx_perftest, ucp_am_bw"; }
  absl::StatusOr<double> Move(std::int64_t bytes) override {
    const auto result = RunUcxPerftest(kChunkBytes, kUcxMessages);
    if (!result.ok()) return result.status();
    return static_cast<double>(bytes) / result->bytes_per_second;
  }
};

}  // namespace

std::unique_ptr<RawTransfer> MakeRawCopy(std::int64_t bytes) { return std::make_unique<RawCopy>(bytes); }

absl::StatusOr<std::unique_ptr<RawTransfer>> MakeRawStream(bool unix_socket) {
  auto stream = std::make_unique<RawStream>(unix_socket);
  if (auto status = stream->Open(); !status.ok()) return status;
  return stream;
}

absl::StatusOr<RawTransfers> MakeRawTransfers(const std::string& address, std::int64_t bytes, bool ucx) {
  RawTransfers raw;
  raw.transfers.push_back(MakeRawCopy(bytes));
  auto stream = MakeRawStream(absl::StartsWith(address, "unix:"));
  if (!stream.ok()) return stream.status();
  raw.transfers.push_back(*std::move(stream));
  if (!ucx) return raw;
  const absl::Status works = RunUcxPerftest(kChunkBytes, 10).status();
  if (works.ok()) {
    raw.transfers.push_back(std::make_unique<RawUcx>());
  } else {
    raw.missing.push_back(absl::StrCat("UCX's own rate: ", std::string(works.message())));
  }
  return raw;
}

}  // namespace kvsummary
