#include "client/conformance.h"

#include <openssl/evp.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "client/commands.h"
#include "client/golden.h"
#include "client/status.h"

namespace kvsummary {
namespace {

constexpr std::int32_t kLayers = 3;
constexpr std::int32_t kCaseLayer = 1;

// Lower-case hexadecimal SHA-256 of what was added.
class Sha256 {
 public:
  Sha256() : context_(EVP_MD_CTX_new()) { EVP_DigestInit_ex(context_, EVP_sha256(), nullptr); }
  ~Sha256() { EVP_MD_CTX_free(context_); }
  Sha256(const Sha256&) = delete;
  Sha256& operator=(const Sha256&) = delete;

  Sha256& Add(const void* bytes, std::size_t size) {
    EVP_DigestUpdate(context_, bytes, size);
    return *this;
  }
  std::string Hex() {
    char digest[EVP_MAX_MD_SIZE];
    unsigned int size = 0;
    EVP_DigestFinal_ex(context_, reinterpret_cast<unsigned char*>(digest), &size);
    return absl::BytesToHexString(absl::string_view(digest, size));
  }

 private:
  EVP_MD_CTX* context_;
};

// Strides differ from the case's and are not dense, so that an address computed the wrong way shows.
CacheGeometry GeometryOf(const GoldenCase& golden) {
  CacheGeometry g{.layers = kLayers,
                  .blocks = golden.blocks,
                  .block_size = golden.block_size,
                  .ring_blocks = golden.ring_blocks,
                  .capacity = golden.ring_capacity,
                  .rows_per_layer = golden.ring_capacity + 1,
                  .k = std::max(golden.ring_capacity - (kRegionTokens - 1), 0)};
  g.block_stride = g.dense_block_stride() + kSummaryBytes;
  return g;
}

std::vector<std::int64_t> Range(std::int64_t first, std::int64_t end) {
  std::vector<std::int64_t> range(static_cast<std::size_t>(std::max<std::int64_t>(end - first, 0)));
  std::iota(range.begin(), range.end(), first);
  return range;
}

// A case and a cache, with the client-side copy of backing and ring in the case's own layout.
class CaseRun {
 public:
  CaseRun(Client& client, const GoldenCase& golden, Plane& plane)
      : client_(client),
        golden_(golden),
        plane_(plane),
        cache_(plane.cache()),
        backing_(golden.initial_backing),
        ring_(golden.initial_ring) {}

  // Writes the case's first state to the cache, all but the null blocks.
  absl::Status WriteInitial() {
    const auto page = static_cast<std::size_t>(golden_.page_bytes());
    std::vector<std::uint8_t> pages(static_cast<std::size_t>(golden_.blocks - 1) * page);
    for (std::int64_t block = 1; block < golden_.blocks; ++block) {
      std::memcpy(pages.data() + static_cast<std::size_t>(block - 1) * page, PageInCopy(block), page);
    }
    const LayerSpan layer{kCaseLayer, 1};
    auto status = client_.WritePages(cache_, Range(1, golden_.blocks), layer, pages);
    if (!status.ok()) return status;
    std::vector<std::uint16_t> rows(static_cast<std::size_t>(golden_.ring_blocks - 1) * TailElements());
    for (std::int64_t block = 1; block < golden_.ring_blocks; ++block) {
      std::memcpy(rows.data() + static_cast<std::size_t>(block - 1) * TailElements(), TailInCopy(block),
                  TailElements() * sizeof(std::uint16_t));
    }
    return client_.WriteRing(cache_, Range(1, golden_.ring_blocks), layer, rows);
  }

  absl::Status RunStep(const GoldenStep& step) {
    if (auto status = Apply(step); !status.ok()) return status;
    if (auto status = ReadBack(); !status.ok()) return status;
    return CompareDigests(step);
  }

  absl::Status CompareFinal() const {
    const auto at = std::mismatch(backing_.begin(), backing_.end(), golden_.final_backing.begin()).first;
    if (at != backing_.end()) {
      const std::int64_t offset = at - backing_.begin();
      const std::int64_t in_block = offset % golden_.block_stride_bytes;
      return absl::DataLossError(
          absl::StrCat("final summaries differ first at block ", offset / golden_.block_stride_bytes,
                       " region ", in_block / kSummaryBytes, " channel ", in_block % kSummaryBytes, ": ", *at,
                       ", expected ", golden_.final_backing[static_cast<std::size_t>(offset)]));
    }
    const auto row_at = std::mismatch(ring_.begin(), ring_.end(), golden_.final_ring.begin()).first;
    if (row_at != ring_.end()) {
      const std::int64_t element = row_at - ring_.begin();
      return absl::DataLossError(absl::StrCat("final ring rows differ first at row ", element / kRowElements,
                                              " element ", element % kRowElements));
    }
    return absl::OkStatus();
  }

 private:
  std::size_t TailElements() const {
    return static_cast<std::size_t>(golden_.ring_capacity) * std::size_t{kRowElements};
  }
  std::uint8_t* PageInCopy(std::int64_t block) {
    return backing_.data() + block * golden_.block_stride_bytes;
  }
  std::uint16_t* TailInCopy(std::int64_t block) {
    return ring_.data() + block * golden_.ring_rows_per_block * kRowElements;
  }

  absl::Status Apply(const GoldenStep& step) {
    const auto rows_count = static_cast<std::size_t>(step.rows);
    std::vector<std::uint16_t> rows(rows_count * kRowElements);
    for (std::size_t i = 0; i < rows_count; ++i) {
      std::copy_n(step.key.data() + i * kChannels, kChannels, rows.data() + i * kRowElements);
      std::copy_n(step.z.data() + i * kChannels, kChannels, rows.data() + i * kRowElements + kChannels);
    }
    std::vector<std::int64_t> bases = step.ring_bases;
    for (std::int64_t& base : bases) {
      if (base >= 0) base = base / golden_.ring_rows_per_block * cache_.geometry.rows_per_block();
    }
    const LayerSpan layer{kCaseLayer, 1};
    switch (step.kind) {
      case GoldenStep::Kind::kDecode:
        return plane_
            .Decode(layer,
                    {.slots = step.slots, .positions = step.positions, .ring_bases = bases, .rows = rows})
            .status();
      case GoldenStep::Kind::kVerify:
        return plane_
            .Verify(layer, {.slots = step.slots,
                            .query_start_loc = step.query_start_loc,
                            .seq_lens = step.seq_lens,
                            .ring_bases = bases,
                            .rows = rows})
            .status();
      case GoldenStep::Kind::kPrefill:
        return plane_
            .Prefill(layer, {.slots = step.slots,
                             .positions = step.positions,
                             .query_start_loc = step.query_start_loc,
                             .ring_bases = bases,
                             .rows = rows})
            .status();
    }
    return absl::InternalError("a step of no kind");
  }

  // Lays the daemon's state into the copy.
  absl::Status ReadBack() {
    const LayerSpan all{0, kLayers};
    const auto pages = client_.ReadPages(cache_, Range(0, golden_.blocks), all);
    if (!pages.ok()) return pages.status();
    auto status = Lay<std::uint8_t>(*pages, golden_.blocks, static_cast<std::size_t>(golden_.page_bytes()),
                                    "block", [this](std::int64_t block) { return PageInCopy(block); });
    if (!status.ok()) return status;
    const auto rows = client_.ReadRing(cache_, Range(0, golden_.ring_blocks), all);
    if (!rows.ok()) return rows.status();
    return Lay<std::uint16_t>(*rows, golden_.ring_blocks, TailElements(), "ring block",
                              [this](std::int64_t block) { return TailInCopy(block); });
  }

  // `items` are [blocks][layers][size]. Those of the case go to the copy, all others must be zero.
  template <typename Element, typename Target>
  static absl::Status Lay(const std::vector<Element>& items, std::int64_t blocks, std::size_t size,
                          const char* what, Target target) {
    const Element* item = items.data();
    for (std::int64_t block = 0; block < blocks; ++block) {
      for (std::int32_t layer = 0; layer < kLayers; ++layer, item += size) {
        if (block > 0 && layer == kCaseLayer) {
          std::copy_n(item, size, target(block));
        } else if (std::any_of(item, item + size, [](Element e) { return e != 0; })) {
          return absl::DataLossError(
              absl::StrCat("bytes have appeared in ", what, " ", block, " of layer ", layer));
        }
      }
    }
    return absl::OkStatus();
  }

  absl::Status CompareDigests(const GoldenStep& step) {
    Sha256 mean;
    for (std::int64_t block = 0; block < golden_.blocks; ++block) {
      mean.Add(PageInCopy(block), static_cast<std::size_t>(golden_.page_bytes()));
    }
    std::vector<std::string> differing;
    if (mean.Hex() != step.mean_sha256) differing.emplace_back("mean_sha256");
    if (Sha256().Add(backing_.data(), backing_.size()).Hex() != step.backing_sha256) {
      differing.emplace_back("backing_sha256");
    }
    if (Sha256().Add(ring_.data(), ring_.size() * sizeof(ring_[0])).Hex() != step.ring_sha256) {
      differing.emplace_back("ring_sha256");
    }
    if (differing.empty()) return absl::OkStatus();
    std::string text = "differs from the recorded";
    for (const std::string& name : differing) absl::StrAppend(&text, " ", name);
    return absl::DataLossError(text);
  }

  Client& client_;
  const GoldenCase& golden_;
  Plane& plane_;
  const Cache& cache_;
  std::vector<std::uint8_t> backing_;
  std::vector<std::uint16_t> ring_;
};

void Tell(const std::string& where, const absl::Status& status) {
  absl::FPrintF(stderr, "FAILED %s: %s\n", where, Describe(status));
}

}  // namespace

ConformanceCount RunGoldenFile(Client& client, PlaneKind kind, const std::string& device,
                               const std::string& path) {
  const auto golden = ReadGolden(path);
  if (!golden.ok()) {
    Tell(path, golden.status());
    return {.failed = 1};
  }
  const ConformanceCount all_failed{.failed = std::max<std::int64_t>(std::ssize(golden->steps), 1)};
  const auto plane = Plane::Create(kind, client, absl::StrCat("conformance/", getpid(), "/", golden->name),
                                   device, GeometryOf(*golden));
  if (!plane.ok()) {
    Tell(path, plane.status());
    return all_failed;
  }
  ConformanceCount count;
  CaseRun run(client, *golden, **plane);
  if (auto status = run.WriteInitial(); !status.ok()) {
    Tell(path, status);
    count = all_failed;
  } else {
    for (std::size_t i = 0; i < golden->steps.size(); ++i) {
      const GoldenStep& step = golden->steps[i];
      status = run.RunStep(step);
      if (status.ok() && i + 1 == golden->steps.size()) status = run.CompareFinal();
      ++(status.ok() ? count.passed : count.failed);
      if (!status.ok()) Tell(absl::StrCat(path, " step ", i, " (", GoldenKindName(step.kind), ")"), status);
    }
  }
  if (auto status = (*plane)->Delete(); !status.ok()) {
    Tell(absl::StrCat(path, ", deleting its cache"), status);
    ++count.failed;
  }
  return count;
}

int RunConformance(const Invocation& invocation) {
  const auto client = invocation.Connect();
  if (!client.ok()) return Fail(client.status());
  const PlaneKind plane = *ParsePlane(invocation.Text("plane"));
  ConformanceCount sum;
  for (const std::string& path : invocation.files) {
    const ConformanceCount count = RunGoldenFile(**client, plane, invocation.Text("device"), path);
    absl::PrintF("%s: %d passed, %d failed\n", path, count.passed, count.failed);
    sum.passed += count.passed;
    sum.failed += count.failed;
  }
  absl::PrintF("%d passed, %d failed\n", sum.passed, sum.failed);
  return FlushOutput(sum.failed == 0 ? 0 : kFailure);
}

}  // namespace kvsummary
