// What is open by a key, once however many use it. Not thread-safe: the executor's.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"

namespace kvsummary {

template <typename Opened>
class OpenOnce {
 public:
  // What is open by `key`, or else what `open()`, an absl::StatusOr<std::unique_ptr<Opened>>, makes. It is
  // destroyed, and the key forgotten, with the last pointer to it; that may be after this object.
  template <typename Open>
  absl::StatusOr<std::shared_ptr<Opened>> Get(const std::string& key, const Open& open) {
    if (const auto it = open_->find(key); it != open_->end()) {
      if (auto opened = it->second.lock()) return opened;
    }
    absl::StatusOr<std::unique_ptr<Opened>> made = open();
    if (!made.ok()) return made.status();
    std::shared_ptr<Opened> opened(made->release(), [key, table = open_](Opened* object) {
      table->erase(key);
      delete object;
    });
    open_->insert_or_assign(key, opened);
    return opened;
  }
  std::size_t size() const { return open_->size(); }

 private:
  using Table = std::map<std::string, std::weak_ptr<Opened>>;
  const std::shared_ptr<Table> open_ = std::make_shared<Table>();
};

}  // namespace kvsummary
