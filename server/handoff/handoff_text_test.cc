#include "server/handoff/handoff_text.h"

#include <gtest/gtest.h>

#include "server/error.h"

namespace kvsummary {
namespace {

Handoff Sample() {
  return {.instance = std::string(16, '\xfe'),
          .secret = std::string(16, '\x01'),
          .address = "unix:/run/summaryd/summaryd.sock",
          .layers = 23,
          .committed_tokens = 131072};
}

TEST(HandoffTextTest, ReadsWhatItWrote) {
  Handoff longest = Sample();
  longest.address = std::string(kMaxAddressBytes, 'a');
  Handoff open = Sample();
  open.committed_tokens = -1;
  open.address = "";
  for (const Handoff& handoff : {Sample(), longest, open}) {
    const std::string text = FormatHandoff(handoff);
    EXPECT_LT(text.size(), 1024u);
    EXPECT_EQ(text.find_first_not_of("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"),
              std::string::npos);
    const auto read = ParseHandoff(text);
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_EQ(*read, handoff);
  }
}

TEST(HandoffTextTest, EveryCutAndEveryChangedCharacterIsFound) {
  const std::string text = FormatHandoff(Sample());
  for (std::size_t length = 0; length < text.size(); ++length) {
    EXPECT_EQ(RefusalReason(ParseHandoff(text.substr(0, length)).status()), "HANDOFF_INVALID") << length;
  }
  for (std::size_t i = 0; i < text.size(); ++i) {
    for (const char c : {'A', '_', '=', ' ', '\0', '\xff'}) {
      std::string changed = text;
      if (changed[i] == c) continue;
      changed[i] = c;
      EXPECT_EQ(RefusalReason(ParseHandoff(changed).status()), "HANDOFF_INVALID") << i;
    }
  }
  for (const std::string& other :
       {text + "A", text + text, text + "=", "\n" + text, std::string(5000, 'A')}) {
    EXPECT_EQ(RefusalReason(ParseHandoff(other).status()), "HANDOFF_INVALID");
  }
}

}  // namespace
}  // namespace kvsummary
