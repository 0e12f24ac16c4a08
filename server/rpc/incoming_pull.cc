#include "server/rpc/incoming_pull.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "server/checksum.h"
#include "server/error.h"
#include "server/rpc/handoff_wire.h"
#include "server/rpc/pull_link.h"

namespace kvsummary {
namespace {

constexpr std::int64_t kMaxDamaged = 16;                    // chunks of one hand-off
constexpr std::chrono::milliseconds kLongestLease{60'000};  // that a source is believed
constexpr std::int64_t kMaxOffset = std::int64_t{1} << 60;

}  // namespace

std::int64_t HeldMessage::credit() const {
  const v1::PullChunk& chunk = message_->chunk();
  const auto bytes = std::max(static_cast<std::int64_t>(chunk.data().size()), chunk.size_bytes());
  return std::clamp<std::int64_t>(bytes, 0, kChunkBytes);
}

HeldMessage::~HeldMessage() {
  if (const std::int64_t bytes = credit(); bytes > 0) {
    link_->GiveCredit(stream_, message_->pull(), bytes);
  }
}

v1::PullRequest IncomingPull::Begin(const std::string& secret, const std::string& transfer) const {
  v1::PullRequest request;
  v1::PullBegin* begin = request.mutable_begin();
  begin->set_pull(number_);
  begin->set_offer_secret(secret);
  begin->set_transfer_id(transfer);
  begin->set_regions(acceptance_->wanted().regions);
  for (const auto& [group, run] : acceptance_->wanted().blocks) {
    auto* blocks = begin->add_blocks();
    blocks->set_group(group);
    blocks->set_first(run.first);
    blocks->set_count(run.count);
  }
  for (const Acceptance::HeldRun& run : acceptance_->Held()) {
    auto* held = begin->add_held();
    held->set_part(run.part);
    held->set_first(run.first);
    held->set_count(run.count);
  }
  if (ways_.same_host) begin->add_transports(v1::HANDOFF_TRANSPORT_SAME_HOST);
  if (ways_.ucx) begin->add_transports(v1::HANDOFF_TRANSPORT_UCX);
  begin->set_device_uuid(acceptance_->device().uuid());
  return request;
}

void IncomingPull::Take(const std::shared_ptr<HeldMessage>& message) {
  const auto pulling = pulling_.lock();
  if (pulling == nullptr) return;  // it ends
  const v1::PullResponse& said = **message;
  if (said.has_accepted() && !TakeAccepted(said.accepted(), *pulling)) return;
  for (const v1::PullPart& part : said.parts()) {
    if (!TakePart(part)) return;
  }
  if (said.has_chunk()) TakeChunk(message, *pulling);
  if (said.has_done()) acceptance_->SourceDone(said.done().committed_tokens());
  if (said.has_failed()) TakeFailed(said.failed());
}

bool IncomingPull::Malformed(std::string_view field, std::string_view what) {
  acceptance_->Fail(Refuse(Reason::MESSAGE_MALFORMED, field, absl::StrFormat("the source's %s", what)));
  return false;
}

bool IncomingPull::FallBack(v1::HandoffTransport failed, const std::string& why) {
  link_->FallBack(number_, failed, why);
  return false;
}

void IncomingPull::TakeFailed(const v1::PullFailed& failed) {
  const absl::Status why = FromProto(failed);
  if (!ucx_.peer.empty() && RefusalReason(why) == ReasonName(Reason::PEER_UNREACHABLE)) {
    FallBack(v1::HANDOFF_TRANSPORT_UCX, std::string(why.message()));
  } else {
    acceptance_->Fail(why);
  }
}

bool IncomingPull::TakeAccepted(const v1::PullAccepted& accepted, PullLinks::Pulling& pulling) {
  if (accepted.version() != kPullVersion) {
    acceptance_->Fail(link_->Unreachable(
        absl::StrFormat("it speaks version %d of Pull, not %d", accepted.version(), kPullVersion)));
    return false;
  }
  const auto way = accepted.transport();
  const bool offered = way == v1::HANDOFF_TRANSPORT_GRPC ||
                       (way == v1::HANDOFF_TRANSPORT_SAME_HOST && ways_.same_host) ||
                       (way == v1::HANDOFF_TRANSPORT_UCX && ways_.ucx);
  if (!offered) return Malformed("accepted.transport", "way was not offered to it");
  if (!acceptance_->Begin(FromProto(accepted)).ok()) return false;
  pulling.transport_ = way;
  if (way == v1::HANDOFF_TRANSPORT_UCX) {
    if (auto s = link_->options().peers.Check(accepted.ucx_address()); !s.ok()) {
      return FallBack(way, absl::StrFormat("--peers does not allow its UCX at %s", accepted.ucx_address()));
    }
    ucx_ = {accepted.ucx_address(), accepted.ucx_token(), accepted.ucx_staging()};
  }
  if (way == v1::HANDOFF_TRANSPORT_SAME_HOST) {
    auto view = std::make_shared<PeerMemory::View>(memory_.Open(accepted, acceptance_->device()));
    if (!*view) return FallBack(way, "its memory cannot be mapped");
    view_ = std::move(view);
    // Counted from before it was lent.
    pulling.uncertain_from_ = begun_ + std::clamp(std::chrono::milliseconds(accepted.lease_milliseconds()),
                                                  std::chrono::milliseconds(0), kLongestLease);
  }
  return true;
}

bool IncomingPull::TakePart(const v1::PullPart& part) {
  const std::int32_t number = part.part();
  if (acceptance_->FindPart(number) == nullptr) brought_ = true;
  if (!acceptance_->AddPart(number, FromProto(part)).ok()) return false;
  if (!ucx_.peer.empty()) {
    if (part.offset_bytes() < 0 || part.offset_bytes() > kMaxOffset) {
      return Malformed("part.offset_bytes", "part leaves its memory");
    }
    offsets_[number] = part.offset_bytes();
    return true;
  }
  if (view_ == nullptr) return true;
  const Part* known = acceptance_->FindPart(number);
  if (part.offset_bytes() < 0 || part.offset_bytes() > view_->bytes - known->bytes()) {
    return Malformed("part.offset_bytes", "part leaves its memory");
  }
  if (view_->memory != nullptr) {
    acceptance_->WritePart(number, static_cast<const char*>(view_->memory->data()) + part.offset_bytes(),
                           view_);
    return true;
  }
  const char* data = view_->mapping->data() + part.offset_bytes();
  if (!acceptance_->device().pins_host_memory()) {
    acceptance_->WritePart(number, data, view_);
    return true;
  }
  for (std::int64_t c = 0; c < ChunkCount(*known); ++c) {
    acceptance_->WriteFromHost(number, c, data + ChunkAt(*known, c).offset(*known), view_);
  }
  return true;
}

void IncomingPull::TakeChunk(const std::shared_ptr<HeldMessage>& message, PullLinks::Pulling& pulling) {
  const v1::PullChunk& chunk = (*message)->chunk();
  const std::int64_t bytes = acceptance_->BytesOfChunk(chunk.part(), chunk.chunk());
  if (ucx_.peer.empty() || bytes == 0) return CheckChunk(message, chunk.data(), pulling);
  if (chunk.size_bytes() != bytes) {  // it takes more than its credit
    Malformed("chunk.size_bytes", "chunk has another size");
    return;
  }
  if (!acceptance_->Wants(chunk.part(), chunk.chunk())) return;
  {
    const std::lock_guard lock(mutex_);
    if (!fetching_.emplace(chunk.part(), chunk.chunk()).second) return;
  }
  UcxTransport::Place place = ucx_;
  const Part& part = *acceptance_->FindPart(chunk.part());
  place.offset = offsets_[chunk.part()] + ChunkAt(part, chunk.chunk()).offset(part);
  link_->options().ucx->Fetch(
      place, bytes, [self = shared_from_this(), message, bytes](absl::StatusOr<UcxTransport::Bytes> fetched) {
        {
          const std::lock_guard lock(self->mutex_);
          self->fetching_.erase({(*message)->chunk().part(), (*message)->chunk().chunk()});
        }
        const auto pulling = self->pulling_.lock();
        if (pulling == nullptr) return;
        if (!fetched.ok()) {
          self->FallBack(v1::HANDOFF_TRANSPORT_UCX, std::string(fetched.status().message()));
          return;
        }
        message->fetched = *std::move(fetched);
        const std::string_view data(message->fetched.get(), static_cast<std::size_t>(bytes));
        self->CheckChunk(message, data, *pulling);
      });
}

void IncomingPull::CheckChunk(const std::shared_ptr<HeldMessage>& message, std::string_view data,
                              PullLinks::Pulling& pulling) {
  const v1::PullChunk& chunk = (*message)->chunk();
  if (acceptance_->BytesOfChunk(chunk.part(), chunk.chunk()) == static_cast<std::int64_t>(data.size()) &&
      ChunkChecksum(chunk.part(), chunk.chunk(), data.data(), data.size()) == chunk.checksum()) {
    if (acceptance_->Wants(chunk.part(), chunk.chunk())) brought_ = true;
    return acceptance_->WriteFromHost(chunk.part(), chunk.chunk(), data.data(), message);
  }
  ++link_->stats().handoff_damaged_chunks;
  if (++pulling.damaged_ > kMaxDamaged) {
    return acceptance_->Fail(Refuse(Reason::CHUNK_DAMAGED, "handoff",
                                    absl::StrFormat("chunk %d of part %d, and %d before it, came damaged",
                                                    chunk.chunk(), chunk.part(), kMaxDamaged)));
  }
  v1::PullRequest again;
  again.mutable_again()->set_pull(number_);
  again.mutable_again()->set_part(chunk.part());
  again.mutable_again()->set_chunk(chunk.chunk());
  link_->SendOf(number_, std::move(again));
}

}  // namespace kvsummary
