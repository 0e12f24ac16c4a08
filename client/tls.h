// Where the certificates and the key of connections over TCP lie, as PEM.
//
// A Unix socket is never encrypted: its file's mode says who may connect, and its bytes do not leave the
// host.
#pragma once

#include <string>

namespace kvsummary {

struct TlsFiles {
  std::string ca = {};    // of those that sign the other side's certificate; empty: it is not asked for one
  std::string cert = {};  // this side's, and those between it and its signer; empty: none
  std::string key = {};   // of the first in `cert`, not encrypted
};

}  // namespace kvsummary
