#include "server/rpc/pull_stream.h"

#include <utility>

#include "server/rpc/pull_link.h"

namespace kvsummary {

PullStream::PullStream(std::shared_ptr<PullLink> link, std::uint64_t number, v1::HandoffService::Stub& stub)
    : link_(std::move(link)), number_(number) {
  stub.async()->Pull(&context_, this);
  AddHold();  // writes begin outside of its own calls
  message_ = std::make_shared<v1::PullResponse>();
  StartRead(message_.get());
}

void PullStream::Send(v1::PullRequest request) {
  const std::lock_guard lock(mutex_);
  if (broken_) return;
  requests_.push_back(std::move(request));
  if (requests_.size() == 1) StartWrite(&requests_.front());
}

void PullStream::OnReadDone(bool ok) {
  if (!ok) {
    {
      const std::lock_guard lock(mutex_);
      broken_ = true;
    }
    link_->Broken(this);
    RemoveHold();
    return;
  }
  heard_ = true;
  link_->Take(this, std::move(message_));
  message_ = std::make_shared<v1::PullResponse>();
  StartRead(message_.get());
}

void PullStream::OnWriteDone(bool ok) {
  const std::lock_guard lock(mutex_);
  requests_.pop_front();
  if (!ok || broken_) return;  // reads fail too
  if (!requests_.empty()) StartWrite(&requests_.front());
}

void PullStream::OnDone(const grpc::Status& status) {
  const std::shared_ptr<PullLink> link = link_;
  const std::uint64_t number = number_;
  const bool heard = heard_;
  delete this;
  link->Ended(number, status, heard);
}

}  // namespace kvsummary
