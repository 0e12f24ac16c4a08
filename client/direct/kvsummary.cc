#include "client/direct/kvsummary.h"

#include <algorithm>
#include <exception>
#include <memory>
#include <string>
#include <utility>

#include "client/direct/mapping.h"
#include "client/plain_status.h"
#include "kernels/update.h"

struct kvs_cache {
  std::shared_ptr<const kvsummary::direct::Mapping> mapping;
  kvsummary::CacheGeometry geometry;
};

namespace kvsummary::direct {
namespace {

static_assert(int{KVS_INVALID_ARGUMENT} == kPlainInvalidArgument && int{KVS_INTERNAL} == kPlainInternal &&
              int{KVS_FAILED_PRECONDITION} == kPlainFailedPrecondition &&
              int{KVS_UNAVAILABLE} == kPlainUnavailable && int{KVS_UNIMPLEMENTED} == kPlainUnimplemented &&
              int{KVS_RESOURCE_EXHAUSTED} == kPlainResourceExhausted &&
              int{KVS_DEADLINE_EXCEEDED} == kPlainDeadlineExceeded);
static_assert(sizeof(std::uint64_t) == sizeof(unsigned long long));

struct LastError {
  std::string reason, text;
};
thread_local LastError last_error;

// Runs `body` at the ABI's border: what it throws (only memory can be short) becomes a code.
template <typename Body>
int Guard(Body body) noexcept {
  try {
    PlainStatus status = body();
    if (status.ok()) return KVS_OK;
    last_error = {std::move(status.reason), std::move(status.message)};
    return status.code;
  } catch (const std::exception&) {
    last_error.reason.clear();
    last_error.text.clear();
    return KVS_RESOURCE_EXHAUSTED;
  }
}

PlainStatus Invalid(const char* reason, std::string message) {
  return {kPlainInvalidArgument, reason, std::move(message)};
}

PlainStatus Null(const char* field) { return Invalid("FIELD_MISSING", std::string(field) + " is null"); }

CacheGeometry ToGeometry(const kvs_geometry& g) {
  return {.layers = g.layers,
          .blocks = g.blocks,
          .block_size = g.block_size,
          .block_stride = g.block_stride,
          .ring_blocks = g.ring_blocks,
          .capacity = g.capacity,
          .rows_per_layer = g.rows_per_layer,
          .k = g.k};
}

constexpr std::int32_t kMaxBlockSize = 32768;  // as kvsummary/v1/cache.proto says

// Of positive numbers.
bool ProductAtMost(std::int64_t a, std::int64_t b, std::int64_t limit) { return a <= limit / b; }

// The daemon has checked the geometry of its cache: this one must be possible, and lie in the memory.
PlainStatus CheckGeometry(const CacheGeometry& g, std::int64_t size_bytes) {
  const bool possible = g.layers > 0 && g.blocks > 0 && g.block_size > 0 && g.block_size <= kMaxBlockSize &&
                        g.block_size % kRegionTokens == 0 && g.ring_blocks > 0 && g.capacity > 0 &&
                        g.rows_per_layer >= g.capacity && g.block_stride >= g.dense_block_stride() &&
                        g.block_stride % kSummaryBytes == 0 &&
                        ProductAtMost(g.blocks, g.block_size, kMaxIndex) &&
                        ProductAtMost(g.ring_blocks, g.rows_per_block(), kMaxIndex);
  if (!possible) return Invalid("SIZE_MISMATCH", "geometry is not one of a cache");
  // Within half of what a number holds, the pages and the rings (of kMaxIndex rows) add up without overflow.
  constexpr std::int64_t kMaxPageBytes = std::int64_t{1} << 62;
  if (size_bytes <= 0 || !ProductAtMost(g.blocks, g.block_stride, std::min(size_bytes, kMaxPageBytes)) ||
      g.total_bytes() > size_bytes) {
    return Invalid("SIZE_MISMATCH", "size_bytes is " + std::to_string(size_bytes) +
                                        ", too little for a cache of this geometry");
  }
  return {};
}

bool Aligned(const void* pointer, std::int64_t alignment) {
  return reinterpret_cast<std::uintptr_t>(pointer) % static_cast<std::uintptr_t>(alignment) == 0;
}

PlainStatus CheckArray(const char* field, const void* array, std::int64_t element) {
  if (array == nullptr) return Null(field);
  if (!Aligned(array, element)) {
    return Invalid("BUFFER_RANGE",
                   std::string(field) + " is not aligned to " + std::to_string(element) + " bytes");
  }
  return {};
}

PlainStatus CheckRows(const kvs_rows& rows, std::int64_t alignment) {
  if (auto s = CheckArray("in.key", rows.key, alignment); !s.ok()) return s;
  if (auto s = CheckArray("in.z", rows.z, alignment); !s.ok()) return s;
  const std::int64_t elements = alignment / static_cast<std::int64_t>(sizeof(std::uint16_t));
  for (const auto& [field, stride] : {std::pair{"in.key_stride", rows.key_stride},
                                      {"in.z_stride", rows.z_stride},
                                      {"in.key_layer_stride", rows.key_layer_stride},
                                      {"in.z_layer_stride", rows.z_layer_stride}}) {
    if (stride % elements != 0) {
      return Invalid("BUFFER_RANGE", std::string(field) + " is " + std::to_string(stride) +
                                         " elements, not a multiple of " + std::to_string(elements));
    }
  }
  return {};
}

struct Array {
  const char* field;
  const void* data;
  std::int64_t element_bytes;
};

// Checks a step whose kind has the arrays `own` and all others share.
PlainStatus CheckStep(const kvs_cache& cache, const kvs_step& step, std::initializer_list<Array> own) {
  const CacheGeometry& g = cache.geometry;
  if (step.first_layer < 0 || step.layers < 1 || step.first_layer > g.layers - step.layers) {
    return Invalid("LAYERS_OUT_OF_RANGE", "layers " + std::to_string(step.first_layer) + " + " +
                                              std::to_string(step.layers) + " of a cache of " +
                                              std::to_string(g.layers));
  }
  if (step.rows < 0) return Invalid("SIZE_MISMATCH", "rows is " + std::to_string(step.rows));
  if (step.rows == 0) return {};
  if (auto s = CheckRows(step.in, cache.mapping->alignment()); !s.ok()) return s;
  if (auto s = CheckArray("slots", step.slots, 8); !s.ok()) return s;
  if (auto s = CheckArray("ring_bases", step.ring_bases, 8); !s.ok()) return s;
  if (step.skipped != nullptr) {
    if (auto s = CheckArray("skipped", step.skipped, 8); !s.ok()) return s;
  }
  for (const Array& a : own) {
    if (auto s = CheckArray(a.field, a.data, a.element_bytes); !s.ok()) return s;
  }
  return {};
}

PlainStatus CheckRequests(const kvs_step& step, std::int32_t requests) {
  if (requests >= (step.rows > 0 ? 1 : 0)) return {};
  return Invalid("SIZE_MISMATCH",
                 "requests is " + std::to_string(requests) + " for " + std::to_string(step.rows) + " rows");
}

RowsView ToRows(const kvs_rows& rows) {
  return {static_cast<const std::uint16_t*>(rows.key),
          static_cast<const std::uint16_t*>(rows.z),
          rows.key_stride,
          rows.z_stride,
          rows.key_layer_stride,
          rows.z_layer_stride};
}

// Calls launch(kernels, view, launch parameters), unless there is nothing to do.
template <typename Run>
PlainStatus RunStep(const kvs_cache& cache, const kvs_step& step, Run run) {
  if (step.rows == 0) return {};
  const Mapping& mapping = *cache.mapping;
  const CacheView view = MakeView(cache.geometry, mapping.data(), {step.first_layer, step.layers});
  const Launch launch{.stream = step.stream, .skipped = reinterpret_cast<unsigned long long*>(step.skipped)};
  if (const int error = run(mapping.kernels(), view, launch); error != 0) {
    return {kPlainInternal, "DEVICE_FAILED", "launch: " + mapping.ErrorText(error)};
  }
  return {};
}

}  // namespace
}  // namespace kvsummary::direct

using namespace kvsummary;          // NOLINT: the functions below are outside any namespace
using namespace kvsummary::direct;  // NOLINT

int kvs_map(const kvs_map_args* args, kvs_cache** cache) {
  return Guard([&]() -> PlainStatus {
    if (cache == nullptr) return Null("cache");
    *cache = nullptr;
    if (args == nullptr) return Null("args");
    auto mapped = std::make_unique<kvs_cache>();
    mapped->geometry = ToGeometry(args->geometry);
    if (auto s = CheckGeometry(mapped->geometry, args->size_bytes); !s.ok()) return s;
    if (auto s = FindOrOpen(*args, &mapped->mapping); !s.ok()) return s;
    *cache = mapped.release();
    return {};
  });
}

int kvs_unmap(kvs_cache* cache) {
  return Guard([&]() -> PlainStatus {
    delete cache;
    return {};
  });
}

int kvs_decode(kvs_cache* cache, const kvs_step* step, const int64_t* positions) {
  return Guard([&]() -> PlainStatus {
    if (cache == nullptr) return Null("cache");
    if (step == nullptr) return Null("step");
    if (auto s = CheckStep(*cache, *step, {{"positions", positions, 8}}); !s.ok()) return s;
    return RunStep(*cache, *step, [&](const UpdateKernels& kernels, const CacheView& view, const Launch& l) {
      return kernels.Decode(view, {step->rows, ToRows(step->in), step->slots, positions, step->ring_bases},
                            l);
    });
  });
}

int kvs_verify(kvs_cache* cache, const kvs_step* step, int32_t requests, const int32_t* query_start_loc,
               const int32_t* seq_lens) {
  return Guard([&]() -> PlainStatus {
    if (cache == nullptr) return Null("cache");
    if (step == nullptr) return Null("step");
    if (cache->geometry.capacity < kMinVerifyCapacity) {
      return {kPlainFailedPrecondition, "VERIFY_CAPACITY",
              "verify needs a ring capacity of 8, the cache has " + std::to_string(cache->geometry.capacity)};
    }
    if (auto s = CheckRequests(*step, requests); !s.ok()) return s;
    if (auto s =
            CheckStep(*cache, *step, {{"query_start_loc", query_start_loc, 4}, {"seq_lens", seq_lens, 4}});
        !s.ok()) {
      return s;
    }
    return RunStep(*cache, *step, [&](const UpdateKernels& kernels, const CacheView& view, const Launch& l) {
      return kernels.Verify(
          view,
          {step->rows, requests, ToRows(step->in), step->slots, query_start_loc, seq_lens, step->ring_bases},
          l);
    });
  });
}

int kvs_prefill(kvs_cache* cache, const kvs_step* step, const int64_t* positions, int32_t requests,
                const int32_t* query_start_loc) {
  return Guard([&]() -> PlainStatus {
    if (cache == nullptr) return Null("cache");
    if (step == nullptr) return Null("step");
    if (auto s = CheckRequests(*step, requests); !s.ok()) return s;
    if (auto s =
            CheckStep(*cache, *step, {{"positions", positions, 8}, {"query_start_loc", query_start_loc, 4}});
        !s.ok()) {
      return s;
    }
    return RunStep(*cache, *step, [&](const UpdateKernels& kernels, const CacheView& view, const Launch& l) {
      return kernels.Prefill(
          view,
          {step->rows, requests, ToRows(step->in), step->slots, positions, query_start_loc, step->ring_bases},
          l);
    });
  });
}

void* kvs_data(const kvs_cache* cache) { return cache == nullptr ? nullptr : cache->mapping->data(); }

const char* kvs_last_error(void) { return last_error.text.c_str(); }

const char* kvs_last_reason(void) { return last_error.reason.c_str(); }

const char* kvs_version(void) { return "0.1.0"; }
