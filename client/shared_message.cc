#include "client/shared_message.h"

namespace kvsummary {
namespace {

void FillArray(const SharedArray& array, v1::ArrayReference* (v1::ArrayReferences::*field)(),
               v1::ArrayReferences* arrays) {
  if (array.buffer_id == 0) return;
  v1::ArrayReference* reference = (arrays->*field)();
  reference->set_buffer_id(array.buffer_id);
  reference->set_offset_bytes(array.offset_bytes);
  reference->set_count(array.count);
}

void FillCounter(const SharedCounter& counter, v1::CounterValue* (v1::SharedStep::*field)(),
                 v1::SharedStep* step) {
  if (counter.buffer_id == 0) return;
  v1::CounterValue* value = (step->*field)();
  value->set_buffer_id(counter.buffer_id);
  value->set_offset_bytes(counter.offset_bytes);
  value->set_value(counter.value);
}

}  // namespace

template <typename Request>
void FillShared(const std::string& session_id, const Cache& cache, LayerSpan layers,
                const SharedUpdate& update, Request* request) {
  request->mutable_cache()->set_name(cache.name);
  request->mutable_cache()->set_generation(cache.generation);
  request->mutable_layers()->set_first(layers.first);
  request->mutable_layers()->set_count(layers.count);
  v1::RowsReference* rows = request->mutable_rows()->mutable_reference();
  rows->set_buffer_id(update.rows.buffer_id);
  rows->set_key_offset_bytes(update.rows.key_offset_bytes);
  rows->set_z_offset_bytes(update.rows.z_offset_bytes);
  rows->set_row_stride_bytes(update.rows.row_stride_bytes);
  rows->set_layer_stride_bytes(update.rows.layer_stride_bytes);
  v1::SharedStep* step = request->mutable_shared();
  step->set_session_id(session_id);
  v1::ArrayReferences* arrays = step->mutable_arrays();
  FillArray(update.slots, &v1::ArrayReferences::mutable_slots, arrays);
  FillArray(update.positions, &v1::ArrayReferences::mutable_positions, arrays);
  FillArray(update.query_start_loc, &v1::ArrayReferences::mutable_query_start_loc, arrays);
  FillArray(update.seq_lens, &v1::ArrayReferences::mutable_seq_lens, arrays);
  FillArray(update.ring_bases, &v1::ArrayReferences::mutable_ring_bases, arrays);
  FillCounter(update.ready, &v1::SharedStep::mutable_ready, step);
  FillCounter(update.done, &v1::SharedStep::mutable_done, step);
}

template void FillShared(const std::string&, const Cache&, LayerSpan, const SharedUpdate&,
                         v1::UpdateDecodeRequest*);
template void FillShared(const std::string&, const Cache&, LayerSpan, const SharedUpdate&,
                         v1::UpdateVerifyRequest*);
template void FillShared(const std::string&, const Cache&, LayerSpan, const SharedUpdate&,
                         v1::UpdatePrefillRequest*);

}  // namespace kvsummary
