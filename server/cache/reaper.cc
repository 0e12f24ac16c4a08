#include "server/cache/reaper.h"

#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <chrono>

namespace kvsummary {

Reaper::Reaper(CacheManager& caches)
    : caches_(caches), stop_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)), thread_([this] { Run(); }) {}

Reaper::~Reaper() {
  eventfd_write(stop_.get(), 1);
  thread_.join();
}

void Reaper::Run() {
  constexpr std::chrono::milliseconds kLongest = std::chrono::hours(1);  // what poll can count
  pthread_setname_np(pthread_self(), "reaper");
  pollfd polled[] = {{stop_.get(), POLLIN, 0}, {caches_.reap_descriptor(), POLLIN, 0}};
  do {
    const auto next = caches_.Reap();
    const auto timeout =
        next.has_value() ? std::min(std::chrono::ceil<std::chrono::milliseconds>(*next), kLongest) : kLongest;
    poll(polled, std::size(polled), static_cast<int>(timeout.count()));
  } while (polled[0].revents == 0);
}

}  // namespace kvsummary
