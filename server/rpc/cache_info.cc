#include "server/rpc/cache_info.h"

namespace kvsummary {
namespace {

void ToProto(const CacheGeometry& g, v1::CacheGeometry* out) {
  out->set_layers(g.layers);
  out->set_blocks(g.blocks);
  out->set_block_size(g.block_size);
  out->set_block_stride(g.block_stride);
  out->set_ring_blocks(g.ring_blocks);
  out->set_capacity(g.capacity);
  out->set_rows_per_layer(g.rows_per_layer);
  out->set_k(g.k);
}

void AddView(v1::ViewKind kind, std::int32_t layer, std::int64_t offset, std::int64_t stride,
             std::int64_t bytes, v1::CacheLayout* out) {
  auto* view = out->add_views();
  view->set_kind(kind);
  view->set_layer(layer);
  view->set_offset_bytes(offset);
  view->set_block_stride_bytes(stride);
  view->set_bytes_per_block(bytes);
}

}  // namespace

CacheGeometry FromProto(const v1::CacheGeometry& g) {
  return {.layers = g.layers(),
          .blocks = g.blocks(),
          .block_size = g.block_size(),
          .block_stride = g.block_stride(),
          .ring_blocks = g.ring_blocks(),
          .capacity = g.capacity(),
          .rows_per_layer = g.rows_per_layer(),
          .k = g.k()};
}

void FillInfo(const Cache& cache, v1::CacheInfo* out) {
  const CacheGeometry& g = cache.geometry();
  out->mutable_cache()->set_name(cache.name());
  out->mutable_cache()->set_generation(cache.generation());
  out->set_device(cache.device().name());
  out->set_memory_kind(static_cast<v1::MemoryKind>(cache.memory().kind()));
  out->set_attached(cache.attached());
  ToProto(g, out->mutable_geometry());
  auto* layout = out->mutable_layout();
  layout->set_total_bytes(g.total_bytes());
  layout->set_rows_per_block(g.rows_per_block());
  for (std::int32_t layer = 0; layer < g.layers; ++layer) {
    AddView(v1::VIEW_KIND_SUMMARY, layer, g.page_offset(0, layer), g.block_stride, g.page_bytes(), layout);
    AddView(v1::VIEW_KIND_RING, layer, g.ring_row_offset(0, layer, 0), g.rows_per_block() * kRowBytes,
            std::int64_t{g.rows_per_layer} * kRowBytes, layout);
  }
}

}  // namespace kvsummary
