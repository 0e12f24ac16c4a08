#include "server/handoff/local_pull.h"

#include <utility>

namespace kvsummary {

std::shared_ptr<LocalPull> LocalPull::Start(std::shared_ptr<Offer> offer,
                                            std::shared_ptr<Acceptance> acceptance) {
  std::shared_ptr<LocalPull> pull(new LocalPull(std::move(offer), std::move(acceptance)));
  // On the executor: whoever lets go of the pull last must not do it inside a listener.
  pull->offer_->Listen({pull.get(), 0}, [device = &pull->acceptance_->device(), weak = std::weak_ptr(pull)] {
    device->executor().SubmitFree([weak] {
      if (const auto self = weak.lock()) self->Pump();
    });
  });
  pull->PumpSoon();
  return pull;
}

LocalPull::~LocalPull() { offer_->Forget({this, 0}); }

void LocalPull::PumpSoon() {
  acceptance_->device().executor().SubmitFree([self = shared_from_this()] { self->Pump(); });
}

void LocalPull::Pump() {
  const Offer::View view = offer_->Look(next_);
  if (!view.ended.ok()) return acceptance_->Fail(view.ended);
  if (!begun_) {
    begun_ = true;
    OfferFacts facts{.layers = offer_->layers(),
                     .block_size = offer_->block_size(),
                     .complete = view.complete,
                     .committed_tokens = view.committed_tokens};
    for (const auto& staged : view.parts) {
      if (staged->part.kind == PartKind::kRows) facts.positions = staged->part.positions;
    }
    if (!acceptance_->Begin(facts).ok()) return;
  }
  for (const auto& staged : view.parts) {
    ++next_;
    if (!acceptance_->AddPart(staged->number, staged->part).ok()) return;
    Bring(staged);
  }
  if (view.complete) acceptance_->SourceDone(view.committed_tokens);
}

void LocalPull::Bring(const std::shared_ptr<const StagedPart>& staged) {
  if (acceptance_->device().Reaches(offer_->device())) {
    return acceptance_->WritePart(staged->number, staged->data(), staged);
  }
  offer_->device().executor().SubmitFree([acceptance = acceptance_, staged] { Read(acceptance, staged, 0); });
}

void LocalPull::Read(const std::shared_ptr<Acceptance>& acceptance,
                     const std::shared_ptr<const StagedPart>& staged, std::int64_t chunk) {
  if (!acceptance->status().ok()) return;
  const std::int64_t chunks = ChunkCount(staged->part);
  while (chunk < chunks && !acceptance->Wants(staged->number, chunk)) ++chunk;
  if (chunk == chunks) return;
  // The next chunk is read when this one has been written.
  const std::shared_ptr<std::string> bytes(new std::string, [acceptance, staged, chunk](std::string* read) {
    delete read;
    staged->extent.arena()->device().executor().SubmitFree(
        [acceptance, staged, chunk] { Read(acceptance, staged, chunk + 1); });
  });
  if (auto s = ReadChunk(*staged, ChunkAt(staged->part, chunk), *bytes); !s.ok()) return acceptance->Fail(s);
  acceptance->WriteFromHost(staged->number, chunk, bytes->data(), bytes);
}

}  // namespace kvsummary
