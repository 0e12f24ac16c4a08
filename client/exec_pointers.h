// What exec and posix_spawn take for a list of strings.
#pragma once

#include <string>
#include <vector>

namespace kvsummary {

// Good for as long as the strings are there and unchanged.
inline std::vector<char*> ExecPointers(std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  pointers.reserve(strings.size() + 1);
  for (std::string& s : strings) pointers.push_back(s.data());
  pointers.push_back(nullptr);
  return pointers;
}

}  // namespace kvsummary
