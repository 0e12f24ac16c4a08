// For tests: carries bytes between Unix sockets, and falls silent in the middle of them.
#pragma once

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <list>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace kvsummary {

// Listens at one path and connects each that comes to another. Once so many bytes have come back of one
// connection, nothing more does: it stays open and is read no more.
class ByteRelay {
 public:
  ByteRelay(const std::string& path, std::string target, std::int64_t silent_after)
      : target_(std::move(target)), silent_after_(silent_after), listener_(Socket()) {
    const sockaddr_un address = AddressOf(path);
    if (bind(listener_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0 ||
        listen(listener_, 16) != 0) {
      std::abort();
    }
    threads_.emplace_back([this] { Listen(); });
  }
  ~ByteRelay() {
    CutAll(true);
    shutdown(listener_, SHUT_RDWR);
    while (true) {
      std::thread thread;
      {
        const std::lock_guard lock(mutex_);
        if (threads_.empty()) break;
        thread = std::move(threads_.front());
        threads_.pop_front();
      }
      thread.join();
    }
    for (const int fd : sockets_) close(fd);
    close(listener_);
  }
  ByteRelay(const ByteRelay&) = delete;
  ByteRelay& operator=(const ByteRelay&) = delete;

  int connections() const { return connections_; }
  // Cuts the connections; those that come from now on are carried whole.
  void Heal() {
    silent_after_ = INT64_MAX;
    CutAll(false);
  }

 private:
  static int Socket() { return socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0); }
  static sockaddr_un AddressOf(const std::string& path) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
    return address;
  }

  void CutAll(bool for_good) {
    const std::lock_guard lock(mutex_);
    ending_ = for_good;
    for (const int fd : sockets_) shutdown(fd, SHUT_RDWR);
  }

  void Listen() {
    for (int near = 0; (near = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC)) >= 0;) {
      ++connections_;
      const int far = Socket();
      const sockaddr_un address = AddressOf(target_);
      const bool connected = connect(far, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
      const std::lock_guard lock(mutex_);
      sockets_.insert(sockets_.end(), {near, far});
      if (!connected || ending_) {
        shutdown(near, SHUT_RDWR);
        shutdown(far, SHUT_RDWR);
        continue;
      }
      threads_.emplace_back([near, far] { Carry(near, far, INT64_MAX); });
      threads_.emplace_back([near, far, limit = silent_after_.load()] { Carry(far, near, limit); });
    }
  }

  // An end is passed on; a silence is not one.
  static void Carry(int from, int to, std::int64_t limit) {
    std::vector<char> buffer(64 << 10);
    while (limit > 0) {
      const ssize_t got = read(from, buffer.data(), std::min<std::int64_t>(std::ssize(buffer), limit));
      if (got <= 0) break;
      limit -= got;
      for (ssize_t sent = 0; sent < got;) {
        const ssize_t n = send(to, buffer.data() + sent, static_cast<std::size_t>(got - sent), MSG_NOSIGNAL);
        if (n <= 0) return static_cast<void>(shutdown(from, SHUT_RDWR));
        sent += n;
      }
    }
    if (limit > 0) shutdown(to, SHUT_WR);
  }

  const std::string target_;
  std::atomic<std::int64_t> silent_after_;
  const int listener_;
  std::atomic<int> connections_ = 0;
  std::mutex mutex_;
  bool ending_ = false;
  std::vector<int> sockets_;
  std::list<std::thread> threads_;
};

}  // namespace kvsummary
