// What UCX is told by environment variables, which is the only way for most of it.
#pragma once

#include <string>
#include <vector>

namespace kvsummary {

// This process's environment, and for each variable of UCX that matters to hand-offs and that it does not
// set, a value of ours. UCX reads most of them before main.
std::vector<std::string> UcxEnvironment(const std::string& net_device);

}  // namespace kvsummary
