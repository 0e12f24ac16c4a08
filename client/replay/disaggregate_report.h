// What a replay on two daemons shows people at its end.
#pragma once

#include <string>

#include "client/replay/disaggregate.h"

namespace kvsummary {

std::string FormatTable(const DisaggregateReport& report, const DisaggregateOptions& options);

// One object on one line.
std::string FormatJson(const DisaggregateReport& report, const DisaggregateOptions& options);

}  // namespace kvsummary
