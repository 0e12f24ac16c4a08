#include "server/store/checksummer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "server/checksum.h"

namespace kvsummary {
namespace {

TEST(Checksummer, SumsEveryPageHoweverManyThreadsThereAre) {
  std::mt19937_64 random(1);
  std::string memory(std::size_t{8} << 20, '\0');
  for (char& c : memory) c = static_cast<char>(random());
  for (const int helpers : {0, 1, 3}) {
    Checksummer checksummer(helpers);
    for (const std::size_t bytes : {std::size_t{256}, std::size_t{47'104}, std::size_t{1} << 20}) {
      for (const std::size_t count : {0, 1, 2, 7, 50}) {
        std::vector<Checksummer::Page> pages;
        for (std::size_t i = 0; i < count; ++i) {
          // Of several sizes, as a load of several groups has them.
          const std::size_t size = bytes + random() % 100;
          pages.push_back({memory.data() + random() % (memory.size() - size), size});
        }
        checksummer.Sum(pages);
        for (const Checksummer::Page& page : pages) {
          ASSERT_EQ(page.sum, Checksum(page.data, page.bytes)) << helpers << " " << bytes << " " << count;
        }
      }
    }
  }
}

// Helpers that come late find nothing, and nothing of a call that has ended.
TEST(Checksummer, CallsFollowEachOtherAtOnce) {
  const std::string memory(std::size_t{2} << 20, 'x');
  Checksummer checksummer(3);
  for (int call = 0; call < 300; ++call) {
    std::vector<Checksummer::Page> pages(static_cast<std::size_t>(2 + call % 40),
                                         {memory.data(), (std::size_t{2} << 20) / (call % 40 + 2) + 1, 0});
    for (auto& page : pages) page.bytes = std::min(page.bytes, memory.size());
    checksummer.Sum(pages);
    for (const auto& page : pages) ASSERT_NE(page.sum, 0u);
  }
}

}  // namespace
}  // namespace kvsummary
