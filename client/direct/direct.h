// libkvsummary for C++: the C interface (client/direct/kvsummary.h) with an owner and the kernels' own step
// types. No Abseil. Steps and their pointers are as in kernels/update.h.
#pragma once

#include <string>
#include <utility>

#include "client/direct/kvsummary.h"
#include "client/plain_status.h"
#include "kernels/update.h"

namespace kvsummary {

// A cache that this process has mapped; unmapped when destroyed, which needs every launch on it finished.
class DirectCache {
 public:
  DirectCache() = default;
  DirectCache(DirectCache&& other) noexcept : cache_(std::exchange(other.cache_, nullptr)) {}
  DirectCache& operator=(DirectCache&& other) noexcept {
    std::swap(cache_, other.cache_);
    return *this;
  }
  ~DirectCache() { kvs_unmap(cache_); }

  // Requires that nothing is mapped yet.
  PlainStatus Map(const kvs_map_args& args) { return Result(kvs_map(&args, &cache_)); }
  void* data() const { return kvs_data(cache_); }

  PlainStatus Decode(LayerSpan layers, const DecodeStep& s, const Launch& launch) const {
    const kvs_step step = StepOf(layers, s, launch);
    return Result(kvs_decode(cache_, &step, s.positions));
  }
  PlainStatus Verify(LayerSpan layers, const VerifyStep& s, const Launch& launch) const {
    const kvs_step step = StepOf(layers, s, launch);
    return Result(kvs_verify(cache_, &step, s.requests, s.query_start_loc, s.seq_lens));
  }
  PlainStatus Prefill(LayerSpan layers, const PrefillStep& s, const Launch& launch) const {
    const kvs_step step = StepOf(layers, s, launch);
    return Result(kvs_prefill(cache_, &step, s.positions, s.requests, s.query_start_loc));
  }

 private:
  template <typename Step>
  static kvs_step StepOf(LayerSpan layers, const Step& s, const Launch& launch) {
    return {
        .first_layer = layers.first,
        .layers = layers.count,
        .rows = s.rows,
        .in = {s.in.key, s.in.z, s.in.key_stride, s.in.z_stride, s.in.key_layer_stride, s.in.z_layer_stride},
        .slots = s.slots,
        .ring_bases = s.ring_bases,
        .stream = launch.stream,
        .skipped = reinterpret_cast<std::uint64_t*>(launch.skipped)};
  }
  static PlainStatus Result(int code) {
    return code == KVS_OK ? PlainStatus{} : PlainStatus{code, kvs_last_reason(), kvs_last_error()};
  }

  kvs_cache* cache_ = nullptr;
};

}  // namespace kvsummary
