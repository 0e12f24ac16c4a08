#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <utility>

#include "absl/strings/str_format.h"
#include "kvsummary/v1/cache.grpc.pb.h"
#include "server/cache/validate.h"
#include "server/error.h"
#include "server/rpc/cache_info.h"
#include "server/rpc/counters.h"
#include "server/rpc/grpc_thread.h"
#include "server/rpc/memory_calls.h"
#include "server/rpc/services.h"
#include "server/rpc/status.h"
#include "server/rpc/unary_reactor.h"

namespace kvsummary {
namespace {

// What a message of a streamed read holds, at least one page or tail.
constexpr std::int64_t kReadBytes = 1 << 20;

std::span<const std::int64_t> Ids(const google::protobuf::RepeatedField<std::int64_t>& ids) {
  return {ids.data(), static_cast<std::size_t>(ids.size())};
}

// What ReadPages and WritePages do with blocks, ReadRing and WriteRing do with ring blocks. A *unit* is one
// page or one tail: one block's bytes in one layer.
struct PageUnits {
  static constexpr auto Check = CheckBlocks;
  static constexpr auto AppendPieces = AppendPagePieces;
  static std::int64_t Bytes(const CacheGeometry& g) { return g.page_bytes(); }
  template <typename Request>
  static std::span<const std::int64_t> Of(const Request& r) {
    return Ids(r.blocks());
  }
  static void SetFirst(v1::ReadPagesResponse& reply, std::int64_t first) { reply.set_first_page(first); }
};
struct TailUnits {
  static constexpr auto Check = CheckRingBlocks;
  static constexpr auto AppendPieces = AppendTailPieces;
  static std::int64_t Bytes(const CacheGeometry& g) { return std::int64_t{g.capacity} * kRowBytes; }
  template <typename Request>
  static std::span<const std::int64_t> Of(const Request& r) {
    return Ids(r.ring_blocks());
  }
  static void SetFirst(v1::ReadRingResponse& reply, std::int64_t first) { reply.set_first_tail(first); }
};

// A cache, and ids and layers checked against it.
template <typename Units, typename Request>
absl::StatusOr<std::shared_ptr<Cache>> FindChecked(const CacheManager& caches, const Request& request,
                                                   Access access) {
  auto cache = caches.Find(request.cache().name(), request.cache().generation());
  if (!cache.ok()) return cache;
  const CacheGeometry& g = (*cache)->geometry();
  if (auto s = CheckLayers(g, {request.layers().first(), request.layers().count()}); !s.ok()) return s;
  if (auto s = Units::Check(g, Units::Of(request), access); !s.ok()) return s;
  return cache;
}

// Streams units in order [ids][layers]. One message is copied and written at a time.
template <typename Units, typename Request, typename Reply>
class ReadReactor final : public grpc::ServerWriteReactor<Reply> {
 public:
  ReadReactor(const ServiceContext& context, const Request& request)
      : context_(context),
        call_(context.drain),
        request_(request),
        ids_(Units::Of(request)),
        layers_{request.layers().first(), request.layers().count()} {
    absl::Status status = call_.admitted();
    if (status.ok()) status = FindChecked<Units>(context_.caches, request, Access::kRead).status();
    units_ = static_cast<std::int64_t>(ids_.size()) * layers_.count;
    if (status.ok()) status = Start();
    if (!status.ok()) this->Finish(ToGrpc(status));
  }

  void OnCancel() override { context_.waits.Cancel(wait_); }  // never before the constructor has returned

  void OnWriteDone(bool ok) override {
    if (!ok) return this->Finish(grpc::Status::CANCELLED);
    context_.stats.bytes_read += static_cast<std::int64_t>(reply_.data().size());
    Next();
  }

  void OnDone() override { delete this; }

 private:
  // Begins, once the counter is there that a ReadPages may name.
  absl::Status Start() {
    if constexpr (requires { request_.ready(); }) {
      if (request_.has_ready()) {
        auto session = context_.sessions.Find(request_.session_id());
        if (!session.ok()) return session.status();
        const auto ready = FindCounter(**session, true, request_.ready(), "ready");
        if (!ready.ok()) return ready.status();
        auto wait = context_.waits.Start(*std::move(session), **ready, "ready",
                                         [this](const absl::Status& outcome) { Awaited(outcome); });
        if (wait.ok()) wait_ = *std::move(wait);
        return wait.status();
      }
    }
    Next();
    return absl::OkStatus();
  }

  void Awaited(const absl::Status& outcome) {
    if (outcome.ok()) return OnGrpcThread([this] { Next(); });
    this->Finish(ToGrpc(OfCounter(outcome)));
  }

  void Next() {
    if (done_ == units_) return this->Finish(grpc::Status::OK);
    // Held for one message: a client that stops reading must not keep the memory of a deleted cache.
    auto cache = context_.caches.Find(request_.cache().name(), request_.cache().generation());
    if (!cache.ok()) return this->Finish(ToGrpc(cache.status()));
    Executor& executor = (*cache)->device().executor();
    auto queued = executor.Submit([this, cache = *std::move(cache)] {
      if (auto s = Copy(*cache); !s.ok()) return this->Finish(ToGrpc(s));
      this->StartWrite(&reply_);
    });
    if (!queued.ok()) this->Finish(ToGrpc(queued));
  }

  // (executor) Fills reply_ with the next units.
  absl::Status Copy(Cache& cache) {
    const CacheGeometry& g = cache.geometry();
    const std::int64_t unit_bytes = Units::Bytes(g);
    const std::int64_t end = std::min(units_, done_ + std::max<std::int64_t>(1, kReadBytes / unit_bytes));
    pieces_.clear();
    for (std::int64_t unit = done_; unit < end;) {
      const auto layer = static_cast<std::int32_t>(unit % layers_.count);
      const auto count = static_cast<std::int32_t>(std::min<std::int64_t>(layers_.count - layer, end - unit));
      Units::AppendPieces(g, ids_[static_cast<std::size_t>(unit / layers_.count)],
                          {layers_.first + layer, count}, pieces_);
      unit += count;
    }
    Units::SetFirst(reply_, done_);
    reply_.mutable_data()->resize(static_cast<std::size_t>((end - done_) * unit_bytes));
    done_ = end;
    return cache.CopyOut(pieces_, reply_.mutable_data()->data());
  }

  const ServiceContext context_;
  const Drain::Call call_;
  const Request& request_;  // gRPC keeps it until OnDone
  const std::span<const std::int64_t> ids_;
  const LayerSpan layers_;
  std::int64_t units_ = 0;
  std::int64_t done_ = 0;
  std::vector<Piece> pieces_;
  Reply reply_;
  std::weak_ptr<Waits::Wait> wait_;
};

class CacheService final : public v1::CacheService::CallbackService {
 public:
  explicit CacheService(const ServiceContext& context) : context_(context) {}

  grpc::ServerUnaryReactor* CreateCache(grpc::CallbackServerContext* call,
                                        const v1::CreateCacheRequest* request,
                                        v1::CreateCacheResponse* reply) override {
    auto* reactor = new UnaryReactor(context_.drain);
    if (!reactor->admitted().ok()) return Done(reactor, reactor->admitted());
    CacheManager::Wanted wanted{.name = request->name(),
                                .device = request->device(),
                                .geometry = FromProto(request->geometry()),
                                .kind = static_cast<MemoryKind>(request->memory_kind())};
    std::shared_ptr<Session> session;
    if (!request->session_id().empty()) {
      auto found = context_.sessions.Find(request->session_id());
      if (!found.ok()) return Done(reactor, found.status());
      session = *std::move(found);
      wanted.session = session->number();
    }
    context_.caches.Create(
        std::move(wanted), [call] { return call->IsCancelled(); },
        [this, session, reactor, reply](CacheManager::CacheOr cache) {
          if (cache.ok()) {
            FillInfo(**cache, reply->mutable_info());
            if (session != nullptr) DetachAtEnd(context_, session);
          }
          Done(reactor, cache.status());
        });
    return reactor;
  }

  grpc::ServerUnaryReactor* AttachCache(grpc::CallbackServerContext* /*call*/,
                                        const v1::AttachCacheRequest* request,
                                        v1::AttachCacheResponse* reply) override {
    auto* reactor = new UnaryReactor(context_.drain);
    if (!reactor->admitted().ok()) return Done(reactor, reactor->admitted());
    const auto session = context_.sessions.Find(request->session_id());
    if (!session.ok()) return Done(reactor, session.status());
    context_.caches.Attach(request->name(), (*session)->number(),
                           [this, session = *session, reactor, reply](const CacheManager::CacheOr& cache) {
                             if (cache.ok()) {
                               FillInfo(**cache, reply->mutable_info());
                               DetachAtEnd(context_, session);
                             }
                             Done(reactor, cache.status());
                           });
    return reactor;
  }

  grpc::ServerUnaryReactor* GetCache(grpc::CallbackServerContext* call, const v1::GetCacheRequest* request,
                                     v1::GetCacheResponse* reply) override {
    auto cache = context_.caches.Find(request->name());
    if (cache.ok()) FillInfo(**cache, reply->mutable_info());
    return Done(call->DefaultReactor(), cache.status());
  }

  grpc::ServerUnaryReactor* ListCaches(grpc::CallbackServerContext* call,
                                       const v1::ListCachesRequest* /*request*/,
                                       v1::ListCachesResponse* reply) override {
    for (const auto& cache : context_.caches.List()) FillInfo(*cache, reply->add_caches());
    return Done(call->DefaultReactor(), absl::OkStatus());
  }

  grpc::ServerUnaryReactor* DeleteCache(grpc::CallbackServerContext* call,
                                        const v1::DeleteCacheRequest* request,
                                        v1::DeleteCacheResponse* /*reply*/) override {
    auto* reactor = call->DefaultReactor();
    context_.caches.Delete(request->cache().name(), request->cache().generation(),
                           [reactor](absl::Status status) { Done(reactor, status); });
    return reactor;
  }

  grpc::ServerWriteReactor<v1::ReadPagesResponse>* ReadPages(grpc::CallbackServerContext* /*call*/,
                                                             const v1::ReadPagesRequest* request) override {
    return new ReadReactor<PageUnits, v1::ReadPagesRequest, v1::ReadPagesResponse>(context_, *request);
  }

  grpc::ServerWriteReactor<v1::ReadRingResponse>* ReadRing(grpc::CallbackServerContext* /*call*/,
                                                           const v1::ReadRingRequest* request) override {
    return new ReadReactor<TailUnits, v1::ReadRingRequest, v1::ReadRingResponse>(context_, *request);
  }

  grpc::ServerUnaryReactor* WritePages(grpc::CallbackServerContext* call,
                                       const v1::WritePagesRequest* request,
                                       v1::WritePagesResponse* /*reply*/) override {
    return Write<PageUnits>(call, *request);
  }

  grpc::ServerUnaryReactor* WriteRing(grpc::CallbackServerContext* call, const v1::WriteRingRequest* request,
                                      v1::WriteRingResponse* /*reply*/) override {
    return Write<TailUnits>(call, *request);
  }

  grpc::ServerUnaryReactor* ExportMemory(grpc::CallbackServerContext* /*call*/,
                                         const v1::ExportMemoryRequest* request,
                                         v1::ExportMemoryResponse* reply) override {
    return Admitted([&](CallDone done) { done(kvsummary::ExportMemory(context_, *request, *reply)); });
  }

  grpc::ServerUnaryReactor* ReleaseMemory(grpc::CallbackServerContext* call,
                                          const v1::ReleaseMemoryRequest* request,
                                          v1::ReleaseMemoryResponse* /*reply*/) override {
    return Done(call->DefaultReactor(), kvsummary::ReleaseMemory(context_, *request));
  }

  grpc::ServerUnaryReactor* RegisterBuffer(grpc::CallbackServerContext* /*call*/,
                                           const v1::RegisterBufferRequest* request,
                                           v1::RegisterBufferResponse* reply) override {
    return Admitted(
        [&](const CallDone& done) { kvsummary::RegisterBuffer(context_, *request, *reply, done); });
  }

  grpc::ServerUnaryReactor* UnregisterBuffer(grpc::CallbackServerContext* /*call*/,
                                             const v1::UnregisterBufferRequest* request,
                                             v1::UnregisterBufferResponse* /*reply*/) override {
    return Admitted([&](CallDone done) { kvsummary::UnregisterBuffer(context_, *request, std::move(done)); });
  }

 private:
  static grpc::ServerUnaryReactor* Done(grpc::ServerUnaryReactor* reactor, const absl::Status& status) {
    reactor->Finish(ToGrpc(status));
    return reactor;
  }

  // Calls `start` with what ends the call, unless the daemon drains.
  template <typename Start>
  grpc::ServerUnaryReactor* Admitted(Start start) {
    auto* reactor = new UnaryReactor(context_.drain);
    if (!reactor->admitted().ok()) return Done(reactor, reactor->admitted());
    start([reactor](const absl::Status& status) { Done(reactor, status); });
    return reactor;
  }

  template <typename Units, typename Request>
  grpc::ServerUnaryReactor* Write(grpc::CallbackServerContext* call, const Request& request) {
    auto* reactor = new UnaryReactor(context_.drain);
    if (!reactor->admitted().ok()) return Done(reactor, reactor->admitted());
    auto cache = FindChecked<Units>(context_.caches, request, Access::kWrite);
    if (!cache.ok()) return Done(reactor, cache.status());
    const CacheGeometry& g = (*cache)->geometry();
    const LayerSpan layers{request.layers().first(), request.layers().count()};
    const auto ids = Units::Of(request);
    const auto want = static_cast<unsigned __int128>(ids.size()) * static_cast<std::uint32_t>(layers.count) *
                      static_cast<std::uint64_t>(Units::Bytes(g));
    if (want != request.data().size()) {
      return Done(reactor,
                  Refuse(Reason::SIZE_MISMATCH, "data",
                         absl::StrFormat("%d bytes of data, not %d blocks * %d layers * %d",
                                         request.data().size(), ids.size(), layers.count, Units::Bytes(g))));
    }
    std::vector<Piece> pieces;
    for (const std::int64_t id : ids) Units::AppendPieces(g, id, layers, pieces);
    Executor& executor = (*cache)->device().executor();
    const auto queued = executor.Submit(
        [this, call, reactor, &request, cache = *std::move(cache), pieces = std::move(pieces)]() mutable {
          if (call->IsCancelled()) return reactor->Finish(grpc::Status::CANCELLED);
          const auto status = cache->CopyIn(pieces, request.data().data());
          cache.reset();
          if (status.ok()) context_.stats.bytes_written += static_cast<std::int64_t>(request.data().size());
          Done(reactor, status);
        },
        request.data().size());
    return queued.ok() ? reactor : Done(reactor, queued);
  }

  const ServiceContext context_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeCacheService(const ServiceContext& context) {
  return std::make_unique<CacheService>(context);
}

}  // namespace kvsummary
