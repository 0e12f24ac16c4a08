// Client: pages and ring rows of blocks, read and written.
#include <algorithm>
#include <cstring>
#include <limits>

#include "absl/strings/str_cat.h"
#include "client/client_impl.h"
#include "client/split.h"
#include "client/status.h"

namespace kvsummary {
namespace {

// Beside block numbers and data: tags, lengths, the layer range and the generation; generous.
constexpr std::int64_t kFixedBytes = 128;
// A read is asked for in parts of this size, so that each has a deadline of its own.
constexpr std::int64_t kReadBytes = 64 << 20;

// The two kinds of blocks: how a request names them and a response counts items.
struct Pages {
  static constexpr auto kRead = &v1::CacheService::Stub::ReadPages;
  static constexpr auto kWrite = &v1::CacheService::Stub::WritePages;
  using ReadRequest = v1::ReadPagesRequest;
  using ReadResponse = v1::ReadPagesResponse;
  using WriteRequest = v1::WritePagesRequest;
  using WriteResponse = v1::WritePagesResponse;

  static std::int64_t ItemBytes(const CacheGeometry& g) { return g.page_bytes(); }
  static auto* Numbers(auto& request) { return request.mutable_blocks(); }
  static std::int64_t FirstItem(const ReadResponse& response) { return response.first_page(); }
};

struct Tails {
  static constexpr auto kRead = &v1::CacheService::Stub::ReadRing;
  static constexpr auto kWrite = &v1::CacheService::Stub::WriteRing;
  using ReadRequest = v1::ReadRingRequest;
  using ReadResponse = v1::ReadRingResponse;
  using WriteRequest = v1::WriteRingRequest;
  using WriteResponse = v1::WriteRingResponse;

  static std::int64_t ItemBytes(const CacheGeometry& g) { return std::int64_t{g.capacity} * kRowBytes; }
  static auto* Numbers(auto& request) { return request.mutable_ring_blocks(); }
  static std::int64_t FirstItem(const ReadResponse& response) { return response.first_tail(); }
};

// Where a piece's bytes lie in [blocks][layers][item].
struct ByteRange {
  std::size_t offset, size;
};

ByteRange RangeOf(const BlockPiece& piece, LayerSpan layers, std::int64_t item_bytes) {
  return {static_cast<std::size_t>((piece.first_block * layers.count + piece.first_layer) * item_bytes),
          static_cast<std::size_t>(piece.blocks * piece.layers * item_bytes)};
}

template <typename Kind, typename Request>
void Fill(const Cache& cache, std::span<const std::int64_t> blocks, LayerSpan layers, const BlockPiece& piece,
          Request& request) {
  request.mutable_cache()->set_name(cache.name);
  request.mutable_cache()->set_generation(cache.generation);
  const auto part =
      blocks.subspan(static_cast<std::size_t>(piece.first_block), static_cast<std::size_t>(piece.blocks));
  Kind::Numbers(request)->Assign(part.begin(), part.end());
  request.mutable_layers()->set_first(layers.first + piece.first_layer);
  request.mutable_layers()->set_count(piece.layers);
}

bool WithinCache(const Cache& cache, LayerSpan layers) {
  return layers.first >= 0 && layers.count > 0 && layers.first <= cache.geometry.layers - layers.count;
}

// The whole call as one message: the daemon judges what makes no sense here.
BlockPiece Whole(std::span<const std::int64_t> blocks, LayerSpan layers) {
  return {.blocks = static_cast<std::int64_t>(blocks.size()), .layers = layers.count};
}

template <typename Kind>
absl::Status ReadPiece(const Client::Options& options, v1::CacheService::Stub& stub,
                       const typename Kind::ReadRequest& request, std::int64_t item_bytes,
                       std::span<std::uint8_t> out) {
  grpc::ClientContext context;
  context.set_deadline(DeadlineOf(options));
  const auto reader = (stub.*Kind::kRead)(&context, request);
  typename Kind::ReadResponse response;
  std::size_t read = 0;
  while (reader->Read(&response)) {
    if (Kind::FirstItem(response) * item_bytes != static_cast<std::int64_t>(read) ||
        response.data().size() > out.size() - read) {
      context.TryCancel();
      reader->Finish();
      return absl::InternalError(absl::StrCat("the daemon sent ", response.data().size(), " bytes of item ",
                                              Kind::FirstItem(response), " where byte ", read, " of ",
                                              out.size(), " was due"));
    }
    std::memcpy(out.data() + read, response.data().data(), response.data().size());
    read += response.data().size();
  }
  if (auto status = FromGrpc(reader->Finish()); !status.ok()) return status;
  if (read != out.size()) {
    return absl::InternalError(absl::StrCat("the daemon sent ", read, " of ", out.size(), " bytes"));
  }
  return absl::OkStatus();
}

template <typename Kind, typename Element>
absl::StatusOr<std::vector<Element>> ReadAll(const Client::Options& options, v1::CacheService::Stub& stub,
                                             const Cache& cache, std::span<const std::int64_t> blocks,
                                             LayerSpan layers) {
  const std::int64_t item_bytes = Kind::ItemBytes(cache.geometry);
  std::vector<BlockPiece> pieces{Whole(blocks, layers)};
  if (!WithinCache(cache, layers)) {
    layers.count = 0;  // nothing but an error is due
  } else {
    const std::int64_t max_blocks = std::max<std::int64_t>(
        (options.max_message_bytes - kFixedBytes - static_cast<std::int64_t>(cache.name.size())) /
            kBlockIndexBytes,
        1);
    auto split = SplitBlocks(static_cast<std::int64_t>(blocks.size()), layers.count, item_bytes,
                             std::max(kReadBytes, item_bytes + kBlockIndexBytes), max_blocks);
    if (!split.ok()) return split.status();
    pieces = *std::move(split);
  }
  std::vector<Element> result(blocks.size() * static_cast<std::size_t>(layers.count * item_bytes) /
                              sizeof(Element));
  const std::span<std::uint8_t> bytes(reinterpret_cast<std::uint8_t*>(result.data()),
                                      result.size() * sizeof(Element));
  for (const BlockPiece& piece : pieces) {
    typename Kind::ReadRequest request;
    Fill<Kind>(cache, blocks, layers, piece, request);
    const ByteRange range = layers.count == 0 ? ByteRange{0, 0} : RangeOf(piece, layers, item_bytes);
    const auto status =
        ReadPiece<Kind>(options, stub, request, item_bytes, bytes.subspan(range.offset, range.size));
    if (!status.ok()) return status;
  }
  return result;
}

template <typename Kind>
absl::Status WriteAll(const Client::Options& options, v1::CacheService::Stub& stub, const Cache& cache,
                      std::span<const std::int64_t> blocks, LayerSpan layers,
                      std::span<const std::uint8_t> bytes) {
  const std::int64_t room =
      options.max_message_bytes - kFixedBytes - static_cast<std::int64_t>(cache.name.size());
  const auto count = static_cast<std::int64_t>(blocks.size());
  const std::int64_t item_bytes = Kind::ItemBytes(cache.geometry);
  const auto size = static_cast<std::int64_t>(bytes.size());
  std::vector<BlockPiece> pieces{Whole(blocks, layers)};
  if (size + count * kBlockIndexBytes > room) {
    if (!WithinCache(cache, layers)) {
      return MakeError(absl::StatusCode::kInvalidArgument,
                       absl::StrCat("layers ", layers.first, " to ", layers.first, " + ", layers.count,
                                    " do not lie within the ", cache.geometry.layers, " of the cache"),
                       "LAYERS_OUT_OF_RANGE", "layers");
    }
    if (size != count * layers.count * item_bytes) {
      return MakeError(
          absl::StatusCode::kInvalidArgument,
          absl::StrCat("data has ", size, " bytes, expected ", count * layers.count * item_bytes),
          "SIZE_MISMATCH", "data");
    }
    auto split = SplitBlocks(count, layers.count, item_bytes, room, std::numeric_limits<std::int64_t>::max());
    if (!split.ok()) return split.status();
    pieces = *std::move(split);
  }
  for (const BlockPiece& piece : pieces) {
    typename Kind::WriteRequest request;
    Fill<Kind>(cache, blocks, layers, piece, request);
    const ByteRange range =
        pieces.size() == 1 ? ByteRange{0, bytes.size()} : RangeOf(piece, layers, item_bytes);
    request.set_data(bytes.data() + range.offset, range.size);
    grpc::ClientContext context;
    context.set_deadline(DeadlineOf(options));
    typename Kind::WriteResponse response;
    auto status = FromGrpc((stub.*Kind::kWrite)(&context, request, &response));
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<std::uint8_t>> Client::ReadPages(const Cache& cache,
                                                            std::span<const std::int64_t> blocks,
                                                            LayerSpan layers) {
  return ReadAll<Pages, std::uint8_t>(impl_->options, impl_->caches, cache, blocks, layers);
}

absl::Status Client::WritePages(const Cache& cache, std::span<const std::int64_t> blocks, LayerSpan layers,
                                std::span<const std::uint8_t> pages) {
  return WriteAll<Pages>(impl_->options, impl_->caches, cache, blocks, layers, pages);
}

absl::StatusOr<std::vector<std::uint16_t>> Client::ReadRing(const Cache& cache,
                                                            std::span<const std::int64_t> ring_blocks,
                                                            LayerSpan layers) {
  return ReadAll<Tails, std::uint16_t>(impl_->options, impl_->caches, cache, ring_blocks, layers);
}

absl::Status Client::WriteRing(const Cache& cache, std::span<const std::int64_t> ring_blocks,
                               LayerSpan layers, std::span<const std::uint16_t> rows) {
  return WriteAll<Tails>(impl_->options, impl_->caches, cache, ring_blocks, layers,
                         {reinterpret_cast<const std::uint8_t*>(rows.data()), rows.size_bytes()});
}

}  // namespace kvsummary
