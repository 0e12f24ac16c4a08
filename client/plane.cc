#include "client/plane.h"

#include <algorithm>
#include <initializer_list>
#include <random>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/direct/direct.h"
#include "client/status.h"
#include "client/step_memory.h"
#include "client/update_queue.h"
#include "kernels/update.h"

namespace kvsummary {
namespace {

constexpr std::int64_t kAlignment = 256;  // of every array in a buffer: what any kernel wants, and more

std::int64_t Aligned(std::int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Places arrays one after the other.
class Layout {
 public:
  template <typename T>
  std::int64_t Add(std::span<const T> array) {
    const std::int64_t offset = bytes_;
    bytes_ += Aligned(static_cast<std::int64_t>(array.size_bytes()));
    return offset;
  }
  std::int64_t bytes() const { return bytes_; }

 private:
  std::int64_t bytes_ = 0;
};

class InlinePlane final : public Plane {
 public:
  InlinePlane(Client& client, Cache cache) : Plane(client, std::move(cache)) {}

  absl::StatusOr<UpdateResult> Decode(LayerSpan layers, const DecodeUpdate& update) override {
    return client().Decode(cache(), layers, update);
  }
  absl::StatusOr<UpdateResult> Verify(LayerSpan layers, const VerifyUpdate& update) override {
    return client().Verify(cache(), layers, update);
  }
  absl::StatusOr<UpdateResult> Prefill(LayerSpan layers, const PrefillUpdate& update) override {
    return client().Prefill(cache(), layers, update);
  }
};

class SharedPlane final : public Plane {
 public:
  // `queue`: null where updates are calls.
  SharedPlane(Client& client, std::unique_ptr<ClientSession> session, std::unique_ptr<UpdateQueue> queue,
              Cache cache)
      : Plane(client, std::move(cache)), session_(std::move(session)), queue_(std::move(queue)) {}

  ClientSession* session() const override { return session_.get(); }

  absl::StatusOr<UpdateResult> Decode(LayerSpan layers, const DecodeUpdate& u) override {
    Layout layout;
    layout.Add(u.slots), layout.Add(u.positions), layout.Add(u.ring_bases), layout.Add(u.rows);
    if (auto s = Reserve(layout.bytes()); !s.ok()) return s;
    return Update(&ClientSession::Decode, &UpdateQueue::Decode, layers,
                  {.rows = PutRows(u.rows, u.slots.size()),
                   .slots = Put(u.slots),
                   .positions = Put(u.positions),
                   .ring_bases = Put(u.ring_bases)});
  }
  absl::StatusOr<UpdateResult> Verify(LayerSpan layers, const VerifyUpdate& u) override {
    Layout layout;
    layout.Add(u.slots), layout.Add(u.query_start_loc), layout.Add(u.seq_lens), layout.Add(u.ring_bases);
    layout.Add(u.rows);
    if (auto s = Reserve(layout.bytes()); !s.ok()) return s;
    return Update(&ClientSession::Verify, &UpdateQueue::Verify, layers,
                  {.rows = PutRows(u.rows, u.slots.size()),
                   .slots = Put(u.slots),
                   .query_start_loc = Put(u.query_start_loc),
                   .seq_lens = Put(u.seq_lens),
                   .ring_bases = Put(u.ring_bases)});
  }
  absl::StatusOr<UpdateResult> Prefill(LayerSpan layers, const PrefillUpdate& u) override {
    Layout layout;
    layout.Add(u.slots), layout.Add(u.positions), layout.Add(u.query_start_loc), layout.Add(u.ring_bases);
    layout.Add(u.rows);
    if (auto s = Reserve(layout.bytes()); !s.ok()) return s;
    return Update(&ClientSession::Prefill, &UpdateQueue::Prefill, layers,
                  {.rows = PutRows(u.rows, u.slots.size()),
                   .slots = Put(u.slots),
                   .positions = Put(u.positions),
                   .query_start_loc = Put(u.query_start_loc),
                   .ring_bases = Put(u.ring_bases)});
  }

 private:
  absl::StatusOr<UpdateResult> Update(
      absl::StatusOr<UpdateResult> (ClientSession::*call)(const Cache&, LayerSpan, const SharedUpdate&),
      absl::StatusOr<std::uint64_t> (UpdateQueue::*submit)(const Cache&, LayerSpan, const SharedUpdate&),
      LayerSpan layers, const SharedUpdate& update) {
    if (queue_ == nullptr) return (session_.get()->*call)(cache(), layers, update);
    const auto number = (queue_.get()->*submit)(cache(), layers, update);
    if (!number.ok()) return number.status();
    return queue_->Wait(*number);
  }
  // Makes room for a step in the buffer, and begins at its start.
  absl::Status Reserve(std::int64_t bytes) {
    used_ = Layout();
    if (buffer_ != nullptr && bytes <= buffer_->bytes()) return absl::OkStatus();
    if (buffer_ != nullptr) {
      auto unregistered = session_->UnregisterBuffer(buffer_->id());
      buffer_.reset();  // whatever the answer: it may be lost, and the buffer with it
      if (!unregistered.ok()) return unregistered;
    }
    auto buffer = session_->RegisterBuffer(std::max(bytes, kAlignment));
    if (!buffer.ok()) return buffer.status();
    buffer_ = *std::move(buffer);
    return absl::OkStatus();
  }
  template <typename T>
  SharedArray Put(std::span<const T> array) {
    const std::int64_t offset = used_.Add(array);
    std::copy(array.begin(), array.end(), reinterpret_cast<T*>(buffer_->data() + offset));
    return {buffer_->id(), offset, std::ssize(array)};
  }
  SharedRows PutRows(std::span<const std::uint16_t> values, std::size_t rows) {
    const SharedArray place = Put(values);
    return {.buffer_id = place.buffer_id,
            .key_offset_bytes = place.offset_bytes,
            .z_offset_bytes = place.offset_bytes + kRowBytes / 2,
            .row_stride_bytes = kRowBytes,
            .layer_stride_bytes = static_cast<std::int64_t>(rows) * kRowBytes};
  }

  const std::unique_ptr<ClientSession> session_;
  const std::unique_ptr<UpdateQueue> queue_;
  std::unique_ptr<SharedBuffer> buffer_;
  Layout used_;
};

absl::StatusOr<std::unique_ptr<Plane>> MakeShared(Client& client, std::unique_ptr<ClientSession> session,
                                                  const Cache& cache, bool queued) {
  std::unique_ptr<UpdateQueue> queue;
  if (queued) {
    auto opened = session->OpenQueue();
    if (!opened.ok()) return opened.status();
    queue = *std::move(opened);
  }
  return std::make_unique<SharedPlane>(client, std::move(session), std::move(queue), cache);
}

struct SizeCheck {
  const char* field;
  std::size_t size;
  std::size_t expected;
};

absl::Status CheckSizes(std::initializer_list<SizeCheck> checks) {
  for (const SizeCheck& c : checks) {
    if (c.size == c.expected) continue;
    return MakeError(absl::StatusCode::kInvalidArgument,
                     absl::StrCat(c.field, " has ", c.size, " elements, expected ", c.expected),
                     "SIZE_MISMATCH", c.field);
  }
  return absl::OkStatus();
}

// What a daemon answers to rows with these indices.
void Count(std::int64_t slot, std::int64_t base, std::int64_t position, UpdateResult* result) {
  if (slot < 0 || base < 0) return;
  ++result->rows;
  if (position % kRegionTokens == kRegionTokens - 1) ++result->regions_closed;
}

class DirectPlane final : public Plane {
 public:
  DirectPlane(Client& client, std::unique_ptr<ClientSession> session, Cache cache,
              std::unique_ptr<StepMemory> memory, DirectCache mapped)
      : Plane(client, std::move(cache)),
        session_(std::move(session)),
        memory_(std::move(memory)),
        mapped_(std::move(mapped)) {}
  ~DirectPlane() override {
    Release().IgnoreError();  // a daemon that is gone has no mapping on record
  }

  ClientSession* session() const override { return session_.get(); }

  absl::StatusOr<UpdateResult> Decode(LayerSpan layers, const DecodeUpdate& u) override {
    const std::size_t rows = u.slots.size();
    auto status = CheckSizes({{"positions", u.positions.size(), rows},
                              {"ring_bases", u.ring_bases.size(), rows},
                              {"rows", u.rows.size(), RowElements(layers, rows)}});
    Layout layout;
    layout.Add(u.slots), layout.Add(u.positions), layout.Add(u.ring_bases), layout.Add(u.rows);
    if (status.ok()) status = Begin(layout);
    DecodeStep step;
    step.rows = static_cast<std::int32_t>(rows);
    PutRows(u.rows, rows, &step.in, &status);
    Put(u.slots, &step.slots, &status);
    Put(u.positions, &step.positions, &status);
    Put(u.ring_bases, &step.ring_bases, &status);
    if (status.ok()) status = End(mapped_.Decode(layers, step, LaunchOf()));
    if (!status.ok()) return status;
    UpdateResult result;
    for (std::size_t r = 0; r < rows; ++r) Count(u.slots[r], u.ring_bases[r], u.positions[r], &result);
    return result;
  }
  absl::StatusOr<UpdateResult> Verify(LayerSpan layers, const VerifyUpdate& u) override {
    const std::size_t rows = u.slots.size();
    auto status = CheckSizes({{"query_start_loc", u.query_start_loc.size(), u.seq_lens.size() + 1},
                              {"ring_bases", u.ring_bases.size(), rows},
                              {"rows", u.rows.size(), RowElements(layers, rows)}});
    Layout layout;
    layout.Add(u.slots), layout.Add(u.query_start_loc), layout.Add(u.seq_lens), layout.Add(u.ring_bases);
    layout.Add(u.rows);
    if (status.ok()) status = Begin(layout);
    VerifyStep step;
    step.rows = static_cast<std::int32_t>(rows);
    step.requests = static_cast<std::int32_t>(u.seq_lens.size());
    PutRows(u.rows, rows, &step.in, &status);
    Put(u.slots, &step.slots, &status);
    Put(u.query_start_loc, &step.query_start_loc, &status);
    Put(u.seq_lens, &step.seq_lens, &status);
    Put(u.ring_bases, &step.ring_bases, &status);
    if (status.ok()) status = End(mapped_.Verify(layers, step, LaunchOf()));
    if (!status.ok()) return status;
    UpdateResult result;
    if (rows == 0) return result;  // and no kernel has looked at query_start_loc
    for (std::size_t i = 0; i < u.seq_lens.size(); ++i) {
      const std::int32_t end = u.query_start_loc[i + 1];
      for (std::int32_t r = u.query_start_loc[i]; r < end; ++r) {
        const auto row = static_cast<std::size_t>(r);
        Count(u.slots[row], u.ring_bases[row], std::int64_t{u.seq_lens[i]} - (end - r), &result);
      }
    }
    return result;
  }
  absl::StatusOr<UpdateResult> Prefill(LayerSpan layers, const PrefillUpdate& u) override {
    const std::size_t rows = u.slots.size();
    auto status = CheckSizes(
        {{"positions", u.positions.size(), rows},
         {"ring_bases", u.ring_bases.size(), rows},
         {"query_start_loc", u.query_start_loc.size(), std::max<std::size_t>(u.query_start_loc.size(), 1)},
         {"rows", u.rows.size(), RowElements(layers, rows)}});
    Layout layout;
    layout.Add(u.slots), layout.Add(u.positions), layout.Add(u.query_start_loc), layout.Add(u.ring_bases);
    layout.Add(u.rows);
    if (status.ok()) status = Begin(layout);
    PrefillStep step;
    step.rows = static_cast<std::int32_t>(rows);
    step.requests = static_cast<std::int32_t>(u.query_start_loc.size()) - 1;
    PutRows(u.rows, rows, &step.in, &status);
    Put(u.slots, &step.slots, &status);
    Put(u.positions, &step.positions, &status);
    Put(u.query_start_loc, &step.query_start_loc, &status);
    Put(u.ring_bases, &step.ring_bases, &status);
    if (status.ok()) status = End(mapped_.Prefill(layers, step, LaunchOf()));
    if (!status.ok()) return status;
    UpdateResult result;
    for (std::size_t r = 0; r < rows; ++r) Count(u.slots[r], u.ring_bases[r], u.positions[r], &result);
    return result;
  }

  absl::Status Delete() override {
    if (auto s = Release(); !s.ok()) return s;
    return Plane::Delete();
  }

 private:
  // Unmaps, and says so. Again: nothing.
  absl::Status Release() {
    mapped_ = DirectCache();
    return session_->ReleaseMemory(cache());
  }
  static std::size_t RowElements(LayerSpan layers, std::size_t rows) {
    return static_cast<std::size_t>(std::max(layers.count, 0)) * rows * kRowElements;
  }

  // Makes room for a step of this layout and for the count of skipped rows.
  absl::Status Begin(const Layout& layout) {
    const auto data = memory_->Reserve(kAlignment + layout.bytes());
    if (!data.ok()) return data.status();
    data_ = *data;
    used_ = Layout();
    const std::uint64_t none = 0;
    return memory_->Write(data_, &none, sizeof(none));
  }
  template <typename T>
  void Put(std::span<const T> array, const T** field, absl::Status* status) {
    if (!status->ok()) return;
    char* to = data_ + kAlignment + used_.Add(array);
    *status = memory_->Write(to, array.data(), static_cast<std::int64_t>(array.size_bytes()));
    *field = reinterpret_cast<const T*>(to);
  }
  void PutRows(std::span<const std::uint16_t> values, std::size_t rows, RowsView* in, absl::Status* status) {
    const std::uint16_t* packed = nullptr;
    Put(values, &packed, status);
    if (status->ok()) *in = PackedRows(packed, static_cast<std::int64_t>(rows));
  }
  Launch LaunchOf() const {
    return {.stream = memory_->stream(), .skipped = reinterpret_cast<unsigned long long*>(data_)};
  }
  // Waits for what `launched` has started.
  absl::Status End(const PlainStatus& launched) {
    if (!launched.ok()) return FromPlain(launched);
    if (auto s = memory_->Synchronize(); !s.ok()) return s;
    std::uint64_t skipped = 0;
    if (auto s = memory_->Read(&skipped, data_, sizeof(skipped)); !s.ok()) return s;
    if (skipped == 0) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("the kernels have skipped ", skipped, " rows with bad indices"));
  }

  const std::unique_ptr<ClientSession> session_;
  const std::unique_ptr<StepMemory> memory_;
  DirectCache mapped_;
  char* data_ = nullptr;
  Layout used_;
};

absl::StatusOr<std::unique_ptr<Plane>> MapDirect(Client& client, std::unique_ptr<ClientSession> session,
                                                 const Cache& cache) {
  const auto memory = session->ExportMemory(cache);
  if (!memory.ok()) return memory.status();
  std::unique_ptr<StepMemory> step_memory = MakeHostStepMemory();
  if (memory->kind != HandleKind::kMemfd) {
    auto on_device = MakeCudaStepMemory(memory->device_uuid);
    if (!on_device.ok()) return on_device.status();
    step_memory = *std::move(on_device);
  }
  DirectCache mapped;
  if (auto s = FromPlain(mapped.Map(MapArguments(*session, cache, *memory))); !s.ok()) {
    session->ReleaseMemory(cache).IgnoreError();  // the first error is the one to tell
    return s;
  }
  return std::make_unique<DirectPlane>(client, std::move(session), cache, std::move(step_memory),
                                       std::move(mapped));
}

}  // namespace

absl::StatusOr<PlaneKind> ParsePlane(const std::string& name) {
  if (name == "inline") return PlaneKind::kInline;
  if (name == "shared") return PlaneKind::kShared;
  if (name == "queue") return PlaneKind::kQueue;
  if (name == "direct") return PlaneKind::kDirect;
  return absl::InvalidArgumentError("planes are inline, shared, queue and direct");
}

Flag PlaneFlag() {
  return {"plane", "PLANE", "inline", "inline, shared, queue or direct: how rows get to the cache",
          [](const std::string& value) { return ParsePlane(value).status(); }};
}

absl::StatusOr<std::unique_ptr<Plane>> Plane::Create(PlaneKind kind, Client& client, const std::string& name,
                                                     const std::string& device,
                                                     const CacheGeometry& geometry) {
  if (kind == PlaneKind::kInline) {
    const auto cache = client.CreateCache(name, device, geometry);
    if (!cache.ok()) return cache.status();
    return std::make_unique<InlinePlane>(client, *cache);
  }
  auto session = client.OpenSession(name);
  if (!session.ok()) return session.status();
  const auto cache = (*session)->CreateCache(name, device, geometry);
  if (!cache.ok()) return cache.status();
  absl::StatusOr<std::unique_ptr<Plane>> plane;
  if (kind == PlaneKind::kDirect) {
    plane = MapDirect(client, *std::move(session), *cache);
  } else {
    plane = MakeShared(client, *std::move(session), *cache, kind == PlaneKind::kQueue);
  }
  if (!plane.ok()) client.DeleteCache(*cache).IgnoreError();  // the first error is the one to tell
  return plane;
}

absl::Status Plane::Delete() { return client_.DeleteCache(cache_); }

std::string UniqueName(const std::string& prefix) {
  std::random_device random;
  return absl::StrFormat("%s-%08x%08x", prefix, random(), random());
}

kvs_map_args MapArguments(const ClientSession& session, const Cache& cache, const ExportedMemory& memory) {
  const CacheGeometry& g = cache.geometry;
  return {.socket_path = session.descriptor_socket().c_str(),
          .kind = static_cast<std::int32_t>(memory.kind),
          .handle = memory.handle.data(),
          .handle_bytes = memory.handle.size(),
          .size_bytes = memory.size_bytes,
          .offset_bytes = memory.offset_bytes,
          .device_uuid = memory.device_uuid.c_str(),
          .pid_namespace = memory.pid_namespace,
          .generation = memory.generation,
          .geometry = {g.layers, g.blocks, g.block_size, g.block_stride, g.ring_blocks, g.capacity,
                       g.rows_per_layer, g.k}};
}

}  // namespace kvsummary
