#include "server/rpc/pull_links.h"

#include <utility>

#include "absl/strings/str_format.h"
#include "client/tls_credentials.h"
#include "server/error.h"
#include "server/rpc/pull_link.h"

namespace kvsummary {
namespace {

constexpr std::size_t kMaxLinks = 256;

}  // namespace

PullLinks::Pulling::~Pulling() {
  if (link_ != nullptr) link_->End(key_);
}

void PullLinks::Pulling::Acknowledge(std::function<void(absl::Status)> done) {
  link_->Acknowledge(key_, std::move(done));
}

PullLinks::PullLinks(const Options& options, Stats& stats)
    : options_(options), stats_(stats), tcp_(TcpCredentials(options.tls)) {}

void PullLinks::Close() {
  std::vector<std::shared_ptr<PullLink>> links;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    links.swap(closing_);
    for (const auto& [address, link] : links_) links.push_back(link);
    links_.clear();
  }
  for (const auto& link : links) link->Close();
}

absl::StatusOr<std::shared_ptr<PullLink>> PullLinks::Find(const std::string& address) {
  std::lock_guard lock(mutex_);
  if (closed_) return Refuse(Reason::PEER_UNREACHABLE, "handoff", "the daemon ends");
  if (const auto found = links_.find(address); found != links_.end()) return found->second;
  std::erase_if(closing_, [](const auto& link) { return link->closed(); });
  for (auto link = links_.begin(); links_.size() >= kMaxLinks && link != links_.end();) {
    if (!link->second->CloseIfIdle()) {
      ++link;
      continue;
    }
    closing_.push_back(link->second);
    link = links_.erase(link);
  }
  if (links_.size() >= kMaxLinks) {
    return Refuse(Reason::HANDOFF_LIMIT, "handoff",
                  absl::StrFormat("the daemon pulls from %d others already", kMaxLinks));
  }
  return links_[address] = std::make_shared<PullLink>(address, options_, tcp_, stats_);
}

absl::StatusOr<std::shared_ptr<PullLinks::Pulling>> PullLinks::Pull(
    const std::string& address, const std::string& secret, const std::string& transfer,
    const std::shared_ptr<Acceptance>& acceptance) {
  while (true) {
    const auto link = Find(address);
    if (!link.ok()) return link.status();
    if (auto pulling = (*link)->Pull(secret, transfer, acceptance)) return pulling;
    // It has made room for another since it was found.
  }
}

}  // namespace kvsummary
