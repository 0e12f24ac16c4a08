#include "server/cache/mappings.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_format.h"
#include "server/error.h"
#include "server/memory/pidfd.h"

namespace kvsummary {
namespace {

bool Watch(int epoll, int descriptor) {
  epoll_event event{};
  event.events = EPOLLIN;
  return epoll_ctl(epoll, EPOLL_CTL_ADD, descriptor, &event) == 0;
}

}  // namespace

Mappings::Mappings() : epoll_(epoll_create1(EPOLL_CLOEXEC)), wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  Watch(epoll_.get(), wake_.get());
}

absl::Status Mappings::Add(Mapping mapping) {
  const auto same_session = [&](const Mapping& m) { return m.session == mapping.session; };
  if (static_cast<std::size_t>(std::count_if(mappings_.begin(), mappings_.end(), same_session)) >=
      kMaxSessionMappings) {
    return Refuse(
        Reason::SESSION_LIMIT, "session_id",
        absl::StrFormat("the session has mapped memory %d times and not released it", kMaxSessionMappings));
  }
  if (mappings_.size() >= kMaxMappings) {
    return Refuse(Reason::SESSION_LIMIT, "session_id",
                  absl::StrFormat("memory has been mapped %d times and not been released", kMaxMappings));
  }
  if (mapping.pidfd) {
    if (!PidOf(mapping.pidfd.get()) || HasEnded(mapping.pidfd.get())) {
      return Refuse(Reason::DESCRIPTOR_MISSING, "",
                    "the descriptor is not a pidfd of the living process that maps the memory");
    }
    if (!Watch(epoll_.get(), mapping.pidfd.get())) {
      return absl::ResourceExhaustedError(absl::StrFormat("epoll_ctl: %s", std::strerror(errno)));
    }
  }
  mappings_.push_back(std::move(mapping));
  return absl::OkStatus();
}

template <typename Predicate>
void Mappings::RemoveIf(Predicate predicate) {
  for (auto it = mappings_.begin(); it != mappings_.end();) {
    if (!predicate(*it)) {
      ++it;
      continue;
    }
    // Closing would not do: the process that sent the pidfd may hold the same open file.
    if (it->pidfd) epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, it->pidfd.get(), nullptr);
    it = mappings_.erase(it);
  }
}

void Mappings::Release(std::uint64_t session, const std::string& cache, std::uint64_t generation) {
  RemoveIf([&](const Mapping& m) {
    return m.session == session && m.cache == cache && m.generation == generation;
  });
}

void Mappings::EndSession(std::uint64_t session) {
  RemoveIf([&](const Mapping& m) { return m.session == session && !m.pidfd; });
}

void Mappings::Clear() {
  RemoveIf([](const Mapping&) { return true; });
}

void Mappings::Collect() {
  eventfd_t woken = 0;
  eventfd_read(wake_.get(), &woken);
  RemoveIf([](const Mapping& m) { return m.pidfd && HasEnded(m.pidfd.get()); });
}

bool Mappings::IsMapped(const Segment& segment) const {
  return std::any_of(mappings_.begin(), mappings_.end(),
                     [&](const Mapping& m) { return m.segment.get() == &segment; });
}

std::vector<std::string> Mappings::CachesOf(std::uint64_t session) const {
  std::vector<std::string> names;
  for (const Mapping& m : mappings_) {
    if (m.session == session) names.push_back(m.cache);
  }
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  return names;
}

void Mappings::Wake() { eventfd_write(wake_.get(), 1); }

}  // namespace kvsummary
