#include "server/ucx/ucx_helper.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <spdlog/spdlog.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/notification.h"

namespace kvsummary {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kStopGrace{2000};

// 0: sent. EAGAIN: no room. Otherwise the connection is over.
int SendOne(int socket, const UcxCommand& command, int descriptor) {
  iovec bytes{const_cast<UcxCommand*>(&command), sizeof(command)};
  msghdr message{};
  message.msg_iov = &bytes;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  if (descriptor >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &descriptor, sizeof(int));
  }
  while (sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL) < 0) {
    if (errno == ENOBUFS || errno == ENOMEM) return EAGAIN;
    if (errno != EINTR) return errno;
  }
  return 0;
}

enum class Read { kEvent, kNothing, kOver };

Read ReadOne(int socket, UcxEvent& event) {
  while (true) {
    const ssize_t got = recv(socket, &event, sizeof(event), MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return Read::kNothing;
    if (got != sizeof(event)) return Read::kOver;
    event.text[sizeof(event.text) - 1] = 0;
    return Read::kEvent;
  }
}

int CeilMilliseconds(Clock::duration d) {
  return static_cast<int>(std::max<std::int64_t>(0, std::chrono::ceil<milliseconds>(d).count()));
}

absl::Status StatusOf(const UcxEvent& event) {
  return absl::Status(static_cast<absl::StatusCode>(event.code), event.text);
}

absl::Status NotAlive(const std::string& how) { return absl::UnavailableError("the UCX helper " + how); }

bool IsWithin(std::int64_t offset, std::int64_t bytes, std::int64_t size) {
  return bytes > 0 && offset >= 0 && bytes <= size && offset <= size - bytes;
}

absl::Status ParseAddress(const std::string& text, UcxCommand& command) {
  const std::size_t colon = text.rfind(':');
  in_addr ip{};
  if (colon == std::string::npos || inet_pton(AF_INET, text.substr(0, colon).c_str(), &ip) != 1 ||
      !absl::SimpleAtoi(text.substr(colon + 1), &command.port) || command.port == 0 || command.port > 65535) {
    return absl::InvalidArgumentError(absl::StrFormat("'%s' is not an IPv4 address and a port", text));
  }
  command.ipv4 = ip.s_addr;
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<UcxHelper>> UcxHelper::Start(const Options& options) {
  auto process = SpawnUcx(options.binary, options.net_device, options.progress_deadline);
  if (!process.ok()) return process.status();
  // The helper answers a fetch or a revocation within the progress deadline, give or take its own work.
  std::unique_ptr<UcxHelper> helper(
      new UcxHelper(*std::move(process), 2 * options.progress_deadline + milliseconds(1000)));
  if (absl::Status listening = helper->WaitUntilListening(options.start_deadline); !listening.ok()) {
    return listening;
  }
  helper->thread_ = std::thread([h = helper.get()] { h->Run(); });
  spdlog::warn(
      "UCX {} listens on {} ({}) in process {}: it neither authenticates nor encrypts; whoever reaches its "
      "ports can "
      "read what is offered and change what is being received",
      helper->version_, helper->address_, options.net_device, helper->pid());
  return helper;
}

UcxHelper::UcxHelper(UcxProcess process, milliseconds silence)
    : process_(std::move(process)),
      silence_(silence),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      heard_(Clock::now()) {}

UcxHelper::~UcxHelper() {
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
  }
  shutdown(process_.socket.get(), SHUT_RDWR);  // both processes see the end
  if (thread_.joinable()) {
    thread_.join();
  } else {
    Bury();
  }
}

absl::Status UcxHelper::WaitUntilListening(milliseconds deadline) {
  const Clock::time_point end = Clock::now() + deadline;
  UcxEvent event;
  while (true) {
    switch (ReadOne(process_.socket.get(), event)) {
      case Read::kOver: {
        const std::string how = Bury();
        return NotAlive(how + " before it listened; its standard error says why, where UCX is installed");
      }
      case Read::kNothing: {
        pollfd polled{process_.socket.get(), POLLIN, 0};
        const int ready = poll(&polled, 1, CeilMilliseconds(end - Clock::now()));
        if (ready == 0) return NotAlive(absl::StrFormat("does not listen after %d ms", deadline.count()));
        break;
      }
      case Read::kEvent:
        if (event.kind == UcxEventKind::kVersion) version_ = event.text;
        if (event.kind == UcxEventKind::kRefused) return StatusOf(event);
        if (event.kind == UcxEventKind::kListening) {
          address_ = event.text;
          return absl::OkStatus();
        }
    }
  }
}

bool UcxHelper::alive() const {
  absl::MutexLock lock(&mu_);
  return alive_;
}

absl::StatusOr<std::uint32_t> UcxHelper::AddStaging(int fd, std::int64_t bytes) {
  // Whoever has taken the process over could open it anew for writing, unless it is sealed.
  if (const int seals = fcntl(fd, F_GET_SEALS); seals < 0 || (seals & F_SEAL_FUTURE_WRITE) == 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("staging memory: descriptor %d is no memfd with F_SEAL_FUTURE_WRITE", fd));
  }
  Descriptor readable(open(absl::StrCat("/proc/self/fd/", fd).c_str(), O_RDONLY | O_CLOEXEC));
  if (!readable) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "staging memory: descriptor %d cannot be opened for reading: %s", fd, std::strerror(errno)));
  }
  return Add(UcxCommandKind::kAddStaging, std::move(readable), bytes);
}

absl::StatusOr<std::uint32_t> UcxHelper::AddLanding(int fd, std::int64_t bytes) {
  Descriptor copy(fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!copy) {
    return absl::InvalidArgumentError(
        absl::StrFormat("landing memory: descriptor %d: %s", fd, std::strerror(errno)));
  }
  return Add(UcxCommandKind::kAddLanding, std::move(copy), bytes);
}

absl::StatusOr<std::uint32_t> UcxHelper::Add(UcxCommandKind kind, Descriptor descriptor, std::int64_t bytes) {
  absl::MutexLock one_at_a_time(&adding_);
  UcxCommand command{};
  command.kind = kind;
  command.bytes = bytes;
  absl::Status status;
  absl::Notification answered;
  Ask(command, std::move(descriptor), [&](absl::Status s) {
    status = std::move(s);
    answered.Notify();
  });
  answered.WaitForNotification();
  if (!status.ok()) return status;
  absl::MutexLock lock(&mu_);
  std::vector<std::int64_t>& sizes = kind == UcxCommandKind::kAddStaging ? staging_bytes_ : landing_bytes_;
  sizes.push_back(bytes);
  return static_cast<std::uint32_t>(sizes.size() - 1);
}

absl::Status UcxHelper::Lend(std::uint64_t token, std::uint32_t staging, std::int64_t offset,
                             std::int64_t bytes) {
  UcxCommand command{};
  command.kind = UcxCommandKind::kLend;
  command.token = token;
  command.staging = staging;
  command.from = offset;
  command.bytes = bytes;
  absl::MutexLock lock(&mu_);
  if (staging >= staging_bytes_.size() || !IsWithin(offset, bytes, staging_bytes_[staging])) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%d bytes at %d are not within staging memory %d", bytes, offset, staging));
  }
  if (!alive_) return NotAlive("is not running");
  Send(command, Descriptor());
  return absl::OkStatus();
}

void UcxHelper::Revoke(std::uint64_t token, absl::AnyInvocable<void() &&> done) {
  UcxCommand command{};
  command.kind = UcxCommandKind::kRevoke;
  command.token = token;
  // Whatever the answer: it is OK, or the process has ended and sends nothing either.
  Ask(command, Descriptor(), [done = std::move(done)](const absl::Status&) mutable { std::move(done)(); });
}

void UcxHelper::Fetch(const Range& range, Done done) {
  UcxCommand command{};
  command.kind = UcxCommandKind::kFetch;
  command.staging = range.staging;
  command.landing = range.landing;
  command.token = range.token;
  command.from = range.from;
  command.bytes = range.bytes;
  command.to = range.to;
  absl::Status refusal = ParseAddress(range.peer, command);
  if (refusal.ok()) {
    absl::MutexLock lock(&mu_);
    if (range.bytes > kMaxUcxFetchBytes || range.landing >= landing_bytes_.size() ||
        !IsWithin(range.to, range.bytes, landing_bytes_[range.landing])) {
      refusal = absl::InvalidArgumentError(
          absl::StrFormat("%d bytes at %d are not within landing memory %d, or more than %d", range.bytes,
                          range.to, range.landing, kMaxUcxFetchBytes));
    }
  }
  if (!refusal.ok()) {
    std::move(done)(std::move(refusal));
    return;
  }
  Ask(command, Descriptor(), std::move(done));
}

void UcxHelper::Ask(UcxCommand command, Descriptor descriptor, Done done) {
  {
    absl::MutexLock lock(&mu_);
    if (alive_) {
      command.id = ++last_id_;
      if (pending_.empty()) {
        heard_ = Clock::now();
        // The thread waits without end: it has to look at the clock from now on.
        eventfd_write(wake_.get(), 1);
      }
      pending_.emplace(command.id, std::move(done));
      Send(command, std::move(descriptor));
      return;
    }
  }
  std::move(done)(NotAlive("is not running"));
}

void UcxHelper::Send(const UcxCommand& command, Descriptor descriptor) {
  if (unsent_.empty() && SendOne(process_.socket.get(), command, descriptor.get()) != EAGAIN) return;
  unsent_.push_back({command, std::move(descriptor)});
  eventfd_write(wake_.get(), 1);
}

void UcxHelper::SendUnsent() {
  absl::MutexLock lock(&mu_);
  while (!unsent_.empty()) {
    const Unsent& next = unsent_.front();
    if (SendOne(process_.socket.get(), next.command, next.descriptor.get()) == EAGAIN) return;
    unsent_.pop_front();
  }
}

bool UcxHelper::ReadEvents() {
  UcxEvent event;
  while (true) {
    const Read read = ReadOne(process_.socket.get(), event);
    if (read != Read::kEvent) return read == Read::kNothing;
    Done done;
    {
      absl::MutexLock lock(&mu_);
      heard_ = Clock::now();
      const auto found = event.kind == UcxEventKind::kDone ? pending_.find(event.id) : pending_.end();
      if (found == pending_.end()) return false;  // not what our helper says
      done = std::move(found->second);
      pending_.erase(found);
    }
    std::move(done)(StatusOf(event));
  }
}

int UcxHelper::PollTimeout() const {
  absl::MutexLock lock(&mu_);
  if (pending_.empty()) return -1;
  return CeilMilliseconds(heard_ + silence_ - Clock::now());
}

void UcxHelper::Run() {
  while (true) {
    const int timeout = PollTimeout();
    bool unsent;
    {
      absl::MutexLock lock(&mu_);
      unsent = !unsent_.empty();
    }
    pollfd polled[2] = {{process_.socket.get(), static_cast<short>(unsent ? POLLIN | POLLOUT : POLLIN), 0},
                        {wake_.get(), POLLIN, 0}};
    const int ready = poll(polled, 2, timeout);
    if (ready < 0 && errno == EINTR) continue;
    if (polled[1].revents != 0) {
      eventfd_t count;
      eventfd_read(wake_.get(), &count);
    }
    SendUnsent();
    if (!ReadEvents()) break;
    if (ready == 0 && timeout == 0) {
      spdlog::error("the UCX helper says nothing: ending it");
      break;
    }
  }
  const std::string how = Bury();
  absl::flat_hash_map<std::uint64_t, Done> pending;
  bool stopping;
  {
    absl::MutexLock lock(&mu_);
    alive_ = false;
    pending = std::exchange(pending_, {});
    unsent_.clear();
    stopping = stopping_;
  }
  if (!stopping) spdlog::error("the UCX helper {}; {} operations were under way", how, pending.size());
  for (auto& [id, done] : pending) std::move(done)(NotAlive(how));
}

std::string UcxHelper::Bury() {
  if (!end_.empty()) return end_;
  bool stopping;
  {
    absl::MutexLock lock(&mu_);
    stopping = stopping_;
  }
  pollfd ended{process_.pidfd.get(), POLLIN, 0};
  // It may have died a moment before its end can be seen: its own is the better answer.
  poll(&ended, 1, stopping ? static_cast<int>(kStopGrace.count()) : 100);
  kill(process_.pid, SIGKILL);
  int status = 0;
  while (waitpid(process_.pid, &status, 0) < 0 && errno == EINTR) {
  }
  end_ = WIFSIGNALED(status) ? absl::StrFormat("was ended by signal %d", WTERMSIG(status))
                             : absl::StrFormat("ended with status %d", WEXITSTATUS(status));
  return end_;
}

}  // namespace kvsummary
