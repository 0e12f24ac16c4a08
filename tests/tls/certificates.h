// Certificates for a test, made when it runs; tests/tls/certificates.sh says which.
#pragma once

#include <cstdlib>
#include <string>

namespace kvsummary {

// Whether NAME.pem and NAME.key have been made in the folder.
inline bool MakeCertificates(const std::string& folder) {
  const std::string script = std::string(std::getenv("TEST_SRCDIR")) + "/" + std::getenv("TEST_WORKSPACE") +
                             "/tests/tls/certificates.sh";
  return std::system((script + " " + folder).c_str()) == 0;
}

}  // namespace kvsummary
