#include "server/handoff/handoff_text.h"

#include <bit>
#include <cstring>

#include "absl/strings/escaping.h"
#include "server/checksum.h"
#include "server/error.h"

namespace kvsummary {
namespace {

static_assert(std::endian::native == std::endian::little);  // numbers are written as they lie in memory

constexpr std::uint32_t kMagic = 0x31'48'56'4b;  // "KVH1": the version is part of it
constexpr std::size_t kMaxTextBytes = 1023;

template <typename T>
void Append(T value, std::string& bytes) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

// Takes fields off the front; what is not there leaves it not good.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : rest_(bytes) {}
  template <typename T>
  void ReadNumber(T& value) {
    const std::string_view bytes = Take(sizeof(value));
    if (good_) std::memcpy(&value, bytes.data(), sizeof(value));
  }
  std::string ReadBytes(std::size_t count) { return std::string(Take(count)); }
  bool AtEnd() const { return good_ && rest_.empty(); }

 private:
  std::string_view Take(std::size_t count) {
    good_ = good_ && count <= rest_.size();
    if (!good_) return {};
    const std::string_view taken = rest_.substr(0, count);
    rest_.remove_prefix(count);
    return taken;
  }
  std::string_view rest_;
  bool good_ = true;
};

absl::Status Invalid(std::string_view why) { return Refuse(Reason::HANDOFF_INVALID, "handoff", why); }

}  // namespace

std::string FormatHandoff(const Handoff& handoff) {
  std::string bytes;
  Append(kMagic, bytes);
  bytes += handoff.instance;
  bytes += handoff.secret;
  Append(handoff.layers, bytes);
  Append(handoff.committed_tokens, bytes);
  Append(static_cast<std::uint16_t>(handoff.address.size()), bytes);
  bytes += handoff.address;
  Append(Checksum(bytes.data(), bytes.size()), bytes);
  return absl::WebSafeBase64Escape(bytes);
}

absl::StatusOr<Handoff> ParseHandoff(std::string_view text) {
  std::string bytes;
  if (text.empty() || text.size() > kMaxTextBytes || !absl::WebSafeBase64Unescape(ToAbsl(text), &bytes) ||
      absl::WebSafeBase64Escape(bytes) != ToAbsl(text)) {
    return Invalid("the hand-off is not text that an offer has answered");
  }
  std::uint64_t checksum = 0;
  if (bytes.size() < sizeof(checksum)) return Invalid("the hand-off is cut");
  const std::size_t body = bytes.size() - sizeof(checksum);
  std::memcpy(&checksum, bytes.data() + body, sizeof(checksum));
  Reader reader(std::string_view(bytes).substr(0, body));
  std::uint32_t magic = 0;
  reader.ReadNumber(magic);
  if (magic != kMagic) return Invalid("the hand-off is none, or of another version");
  if (Checksum(bytes.data(), body) != checksum) return Invalid("the hand-off has been cut or changed");
  Handoff handoff;
  handoff.instance = reader.ReadBytes(kInstanceBytes);
  handoff.secret = reader.ReadBytes(kSecretBytes);
  reader.ReadNumber(handoff.layers);
  reader.ReadNumber(handoff.committed_tokens);
  std::uint16_t address_bytes = 0;
  reader.ReadNumber(address_bytes);
  handoff.address = reader.ReadBytes(address_bytes);
  if (!reader.AtEnd() || address_bytes > kMaxAddressBytes || handoff.layers <= 0 ||
      handoff.committed_tokens < -1) {
    return Invalid("the hand-off has fields that no offer has");
  }
  return handoff;
}

}  // namespace kvsummary
