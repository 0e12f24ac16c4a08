// What a replay shows people: a progress bar while it runs, a table or JSON at the end.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>

#include "client/replay/engine.h"

namespace kvsummary {

// A line that is redrawn a few times a second; nothing at all where `file` is no terminal.
class ProgressBar {
 public:
  explicit ProgressBar(std::FILE* file);
  ~ProgressBar();  // erases the line
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  void Update(std::int64_t done, std::int64_t total, std::int64_t finished_requests);

 private:
  std::FILE* const file_;  // null: not a terminal
  const std::chrono::steady_clock::time_point start_;
  std::chrono::steady_clock::time_point next_draw_;
};

std::string FormatTable(const ReplayReport& report, const EngineOptions& options);

// One object on one line.
std::string FormatJson(const ReplayReport& report, const EngineOptions& options);

}  // namespace kvsummary
