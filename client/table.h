// What the commands that measure print: lines of a table, and the numbers in them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace kvsummary {

// "1,234,567"
std::string Grouped(std::int64_t value);

// A line of a table: two columns, of 30 and 20 characters.
std::string TableLine(const std::string& name, const std::string& value);
std::string TableLine(const std::string& name, std::int64_t value);

// The value that `part` of them do not exceed; 0 of none.
double Percentile(std::vector<double> values, double part);

// A table's line of latencies in microseconds: p50, p99 and how many. Empty of none.
std::string LatencyLine(const std::string& name, const std::vector<double>& us);

}  // namespace kvsummary
