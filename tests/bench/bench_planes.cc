// Time of an update by each plane, beside what gRPC and the kernel alone take, all in one run and in turn.
//
//   bench_planes --address=unix:PATH [--device=host|cuda:N] [--layers=N] [--calls=N] [--json]
//
// An update is a decode step of 1 or 256 requests. "empty call" is AdminService.GetConfig; "no-op, same
// bytes" is GetConfig with the inline update's serialized bytes as a field that it does not know: gRPC and
// protobuf copy and parse as many bytes, nobody looks at them, and the answer is OK. (An update of padding
// rows is no such floor: it takes every step that a live one takes, the launch included.) "kernel" is the
// launch on memory of this process. "over" is the difference of the medians to the line that a plane is held
// against: inline to the no-op, shared to the empty call, queue and direct to the kernel; its goal, where
// there is one, stands beside it. "queue" submits the update through shared memory and waits on the host;
// "queue, stream" has it wait for a counter that the caller's stream sets, and the stream for the answer.
// Rows of the direct and shared planes lie where a worker would have them: on CUDA in device memory, which
// "shared" registers by its IPC handle ("shared, host rows": in a memfd). CUDA times go from the call to the
// end of its stream. The first calls of a turn are not counted: they pay for the turn before, when another
// process had the GPU.
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "client/client.h"
#include "client/direct/direct.h"
#include "client/plane.h"
#include "client/session.h"
#include "client/status.h"
#include "client/step_memory.h"
#include "client/update_queue.h"
#include "kernels/update.h"
#include "kvsummary/v1/admin.grpc.pb.h"
#include "kvsummary/v1/update.pb.h"

namespace kvsummary {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kRounds = 20;
constexpr int kUncounted = 5;  // calls at the start of a turn
constexpr int kBlockTokens = 64;
constexpr std::int64_t kAlignment = 256;

struct Options {
  std::string address;
  std::string device = "host";
  int layers = 1;
  int calls = 2000;
  bool json = false;
};

[[noreturn]] void Fail(const char* what, const absl::Status& status) {
  std::fprintf(stderr, "bench_planes: %s: %s\n", what, Describe(status).c_str());
  std::exit(1);
}

void Check(const char* what, const absl::Status& status) {
  if (!status.ok()) Fail(what, status);
}

template <typename T>
T Get(const char* what, absl::StatusOr<T> result) {
  if (!result.ok()) Fail(what, result.status());
  return *std::move(result);
}

// The arrays of decode steps: one for every position of a block, of the same requests; and rows for all.
struct Steps {
  Steps(int request_count, const CacheGeometry& geometry) : requests(request_count), g(geometry) {
    for (int position = 0; position < kBlockTokens; ++position) {
      for (std::int64_t request = 1; request <= requests; ++request) {
        slots.push_back(request * kBlockTokens + position);
        positions.push_back(position);
        bases.push_back(request * g.rows_per_block());
      }
    }
    std::mt19937 random(1);
    rows.resize(static_cast<std::size_t>(g.layers) * requests * kRowElements);
    for (auto& value : rows) value = static_cast<std::uint16_t>(0x3e80 + random() % 0x180);
  }

  // Bytes from the start of a copy of slots, positions, bases and rows to each.
  std::int64_t array_bytes() const { return static_cast<std::int64_t>(slots.size()) * 8; }
  std::int64_t rows_offset() const { return (3 * array_bytes() + kAlignment - 1) / kAlignment * kAlignment; }
  std::int64_t row_bytes() const { return static_cast<std::int64_t>(rows.size()) * 2; }
  std::int64_t bytes() const { return rows_offset() + row_bytes(); }
  // Bytes from the start of an array to step i.
  std::int64_t StepOffset(int i) const { return std::int64_t{i % kBlockTokens} * requests * 8; }

  void CopyTo(StepMemory& memory, char* to) const {
    Check("copy", memory.Write(to, slots.data(), array_bytes()));
    Check("copy", memory.Write(to + array_bytes(), positions.data(), array_bytes()));
    Check("copy", memory.Write(to + 2 * array_bytes(), bases.data(), array_bytes()));
    Check("copy", memory.Write(to + rows_offset(), rows.data(), row_bytes()));
  }
  DecodeStep InMemory(const char* at, int i) const {
    const auto array = [&](int number) {
      return reinterpret_cast<const std::int64_t*>(at + number * array_bytes() + StepOffset(i));
    };
    return {requests, PackedRows(at + rows_offset(), requests), array(0), array(1), array(2)};
  }
  DecodeUpdate Inline(int i) const {
    const auto part = [&](const std::vector<std::int64_t>& array) {
      return std::span(array).subspan(static_cast<std::size_t>(StepOffset(i) / 8),
                                      static_cast<std::size_t>(requests));
    };
    return {part(slots), part(positions), part(bases), rows};
  }

  const int requests;
  const CacheGeometry g;
  std::vector<std::int64_t> slots, positions, bases;
  std::vector<std::uint16_t> rows;
};

struct Variant {
  std::string name;
  std::function<void(int)> call;  // of step i
  std::vector<double> us = {};
};

struct Result {
  std::string name;
  int requests;
  double p50_us, p99_us;
  std::string beside = {};  // the line that it is held against; empty: it is one itself
  double over_us = 0;
  double goal_us = 0;  // of over_us; 0: none
};

// What inline may take over its floor beside the kernel, the queue from the caller's stream to it again and
// direct over the kernel.
constexpr double kInlineGoalUs = 15;
constexpr double kQueueGoalUs = 12;
constexpr double kDirectGoalUs = 2.5;

// Everything measured for one number of requests.
class Bench {
 public:
  Bench(const Options& options, Client& client, int requests)
      : options_(options),
        client_(client),
        geometry_{.layers = options.layers,
                  .blocks = requests + 1,
                  .block_size = kBlockTokens,
                  .block_stride = std::int64_t{options.layers} * kBlockTokens / kRegionTokens * kSummaryBytes,
                  .ring_blocks = requests + 1,
                  .capacity = 10,
                  .rows_per_layer = 10,
                  .k = 3},
        steps_(requests, geometry_) {}

  std::vector<Result> Run() {
    AddFloors();
    AddInline();
    AddSession();
    AddKernel();
    for (int round = -1; round < kRounds; ++round) {  // the first one warms up
      for (Variant& variant : variants_) Round(variant, round >= 0);
    }
    Check("delete", client_.DeleteCache(inline_));
    if (rows_id_ != 0) Check("UnregisterBuffer", session_->UnregisterBuffer(rows_id_));
    direct_ = DirectCache();
    Check("release", session_->ReleaseMemory(shared_));
    Check("delete", client_.DeleteCache(shared_));
    std::vector<Result> results;
    for (Variant& v : variants_) {
      std::sort(v.us.begin(), v.us.end());
      results.push_back({v.name, steps_.requests, v.us[v.us.size() / 2], v.us[v.us.size() * 99 / 100]});
    }
    Hold(results, "inline", kNoOp, kInlineGoalUs + P50(results, kKernel));
    Hold(results, "shared", kEmpty, 0);
    Hold(results, "shared, host rows", kEmpty, 0);
    Hold(results, "queue", kKernel, 0);
    Hold(results, "queue, stream", kKernel, kQueueGoalUs);
    Hold(results, "direct", kKernel, kDirectGoalUs);
    return results;
  }

 private:
  static constexpr const char* kEmpty = "empty call";
  static constexpr const char* kNoOp = "no-op, same bytes";
  static constexpr const char* kKernel = "kernel";

  static double P50(const std::vector<Result>& results, const std::string& name) {
    for (const Result& r : results) {
      if (r.name == name) return r.p50_us;
    }
    return 0;
  }
  static void Hold(std::vector<Result>& results, const std::string& name, const char* beside,
                   double goal_us) {
    for (Result& r : results) {
      if (r.name != name) continue;
      r.beside = beside;
      r.over_us = r.p50_us - P50(results, beside);
      r.goal_us = goal_us;
    }
  }

  void Add(std::string name, std::function<void(int)> call) {
    variants_.push_back({std::move(name), std::move(call)});
  }

  void Round(Variant& variant, bool record) {
    const int calls = std::max(options_.calls / kRounds, 1);
    for (int i = -kUncounted; i < calls; ++i) {
      const auto start = Clock::now();
      variant.call(i + kUncounted);
      const double us = std::chrono::duration<double, std::micro>(Clock::now() - start).count();
      if (record && i >= 0) variant.us.push_back(us);
    }
  }

  void AddFloors() {
    admin_ =
        v1::AdminService::NewStub(grpc::CreateChannel(options_.address, grpc::InsecureChannelCredentials()));
    Add(kEmpty, [this](int) {
      grpc::ClientContext context;
      v1::GetConfigResponse response;
      if (!admin_->GetConfig(&context, {}, &response).ok()) Fail("GetConfig", absl::InternalError("refused"));
    });
    const DecodeUpdate update = steps_.Inline(0);
    v1::UpdateDecodeRequest message;
    message.mutable_cache()->set_name("bench/inline");
    message.mutable_rows()->set_inline_(update.rows.data(), update.rows.size_bytes());
    message.mutable_slots()->Add(update.slots.begin(), update.slots.end());
    message.mutable_positions()->Add(update.positions.begin(), update.positions.end());
    message.mutable_ring_bases()->Add(update.ring_bases.begin(), update.ring_bases.end());
    const std::string bytes = message.SerializeAsString();
    Add(kNoOp, [this, bytes](int) {
      grpc::ClientContext context;
      v1::GetConfigRequest request;
      request.GetReflection()->MutableUnknownFields(&request)->AddLengthDelimited(1, bytes);
      v1::GetConfigResponse response;
      if (!admin_->GetConfig(&context, request, &response).ok()) {
        Fail("GetConfig with more bytes", absl::InternalError("refused"));
      }
    });
  }

  void AddInline() {
    inline_ = Get("CreateCache", client_.CreateCache("bench/inline", options_.device, geometry_));
    Add("inline",
        [this](int i) { Check("inline", client_.Decode(inline_, all_, steps_.Inline(i)).status()); });
  }

  void AddSession() {
    session_ = Get("OpenSession", client_.OpenSession("bench"));
    shared_ = Get("CreateCache", session_->CreateCache("bench/shared", options_.device, geometry_));
    buffer_ = Get("RegisterBuffer", session_->RegisterBuffer(steps_.bytes()));
    steps_.CopyTo(*MakeHostStepMemory(), buffer_->data());
    exported_ = Get("ExportMemory", session_->ExportMemory(shared_));
    const bool cuda = exported_.kind != HandleKind::kMemfd;
    memory_ = cuda ? Get("step memory", MakeCudaStepMemory(exported_.device_uuid)) : MakeHostStepMemory();
    at_ = Get("step memory", memory_->Reserve(steps_.bytes()));
    steps_.CopyTo(*memory_, at_);
    if (cuda) {
      const std::string handle = Get("IpcHandle", memory_->IpcHandle());
      rows_id_ = Get(
          "RegisterCudaBuffer",
          session_->RegisterCudaBuffer({reinterpret_cast<const std::uint8_t*>(handle.data()), handle.size()},
                                       0, steps_.bytes(), exported_.device_uuid));
      Add("shared", [this](int i) { CallShared(i, rows_id_); });
      Add("shared, host rows", [this](int i) { CallShared(i, buffer_->id()); });
    } else {
      Add("shared", [this](int i) { CallShared(i, buffer_->id()); });
    }

    queue_ = Get("OpenQueue", session_->OpenQueue());
    counters_ = Get("RegisterBuffer", session_->RegisterBuffer(4096));
    Check("register", memory_->Register(queue_->memory()));
    Check("register", memory_->Register({counters_->data(), 4096}));
    const std::uint64_t rows_id = cuda ? rows_id_ : buffer_->id();
    Add("queue", [this, rows_id](int i) {
      const auto number = queue_->Decode(shared_, all_, SharedStep(i, rows_id));
      Check("queue", number.status());
      Check("queue", queue_->Wait(*number).status());
    });
    Add("queue, stream", [this, rows_id](int i) {
      auto* ready = reinterpret_cast<std::uint64_t*>(counters_->data());
      SharedUpdate update = SharedStep(i, rows_id);
      update.ready = {counters_->id(), 0, ++ready_};
      const auto number = queue_->Decode(shared_, all_, update);
      Check("queue", number.status());
      Check("signal", memory_->Signal(ready, ready_));
      Check("await", memory_->Await(queue_->completed(), *number));
      Check("queue", memory_->Synchronize());
      Check("queue", queue_->Wait(*number).status());
    });

    arguments_ = MapArguments(*session_, shared_, exported_);
    Check("kvs_map", FromPlain(direct_.Map(arguments_)));
    Add("direct", [this](int i) {
      Check("direct",
            FromPlain(direct_.Decode(all_, steps_.InMemory(at_, i), {.stream = memory_->stream()})));
      Check("direct", memory_->Synchronize());
    });
    Add("repeated kvs_map", [this](int) {
      DirectCache again;
      Check("kvs_map", FromPlain(again.Map(arguments_)));
    });
  }

  SharedUpdate SharedStep(int i, std::uint64_t rows_id) const {
    const auto array = [&](int number) {
      return SharedArray{buffer_->id(), number * steps_.array_bytes() + steps_.StepOffset(i),
                         steps_.requests};
    };
    const std::int64_t rows = steps_.rows_offset();
    return {
        .rows = {rows_id, rows, rows + kRowBytes / 2, kRowBytes, std::int64_t{steps_.requests} * kRowBytes},
        .slots = array(0),
        .positions = array(1),
        .ring_bases = array(2)};
  }
  void CallShared(int i, std::uint64_t rows_id) {
    Check("shared", session_->Decode(shared_, all_, SharedStep(i, rows_id)).status());
  }

  // The kernel on memory that is this process's own.
  void AddKernel() {
    const bool cuda = exported_.kind != HandleKind::kMemfd;
    own_ = cuda ? Get("step memory", MakeCudaStepMemory(exported_.device_uuid)) : MakeHostStepMemory();
    char* data = Get("step memory", own_->Reserve(geometry_.total_bytes()));
    const std::vector<char> zeros(static_cast<std::size_t>(geometry_.total_bytes()));
    Check("step memory", own_->Write(data, zeros.data(), geometry_.total_bytes()));
    const UpdateKernels& kernels = cuda ? *CudaKernels() : HostKernels();
    Add(kKernel, [this, data, &kernels](int i) {
      const CacheView view = MakeView(geometry_, data, all_);
      if (kernels.Decode(view, steps_.InMemory(at_, i), {.stream = memory_->stream()}) != 0) {
        Fail("kernel", absl::InternalError("launch"));
      }
      Check("kernel", memory_->Synchronize());
    });
  }

  const Options& options_;
  Client& client_;
  const CacheGeometry geometry_;
  const Steps steps_;
  const LayerSpan all_{0, geometry_.layers};
  std::vector<Variant> variants_;
  std::unique_ptr<v1::AdminService::Stub> admin_;
  Cache inline_, shared_;
  std::unique_ptr<ClientSession> session_;
  std::unique_ptr<SharedBuffer> buffer_, counters_;
  std::uint64_t ready_ = 0;
  std::unique_ptr<UpdateQueue> queue_;
  ExportedMemory exported_;
  kvs_map_args arguments_ = {};
  std::unique_ptr<StepMemory> memory_, own_;
  char* at_ = nullptr;
  std::uint64_t rows_id_ = 0;
  DirectCache direct_;
};

void Print(const Options& options, const std::vector<Result>& results) {
  if (options.json) {
    std::printf("{\"device\": \"%s\", \"layers\": %d, \"calls\": %d, \"results\": [", options.device.c_str(),
                options.layers, options.calls);
    for (std::size_t i = 0; i < results.size(); ++i) {
      const Result& r = results[i];
      std::printf(
          "%s\n  {\"plane\": \"%s\", \"requests\": %d, \"p50_us\": %.2f, \"p99_us\": %.2f, \"beside\": "
          "\"%s\", "
          "\"over_us\": %.2f, \"goal_us\": %.2f}",
          i ? "," : "", r.name.c_str(), r.requests, r.p50_us, r.p99_us, r.beside.c_str(), r.over_us,
          r.goal_us);
    }
    std::printf("\n]}\n");
    return;
  }
  std::printf("decode on %s, %d layers, %d calls each\n\n%8s  %-18s %10s %10s %10s  %s\n",
              options.device.c_str(), options.layers, options.calls, "requests", "", "p50 us", "p99 us",
              "over", "beside, goal");
  for (const Result& r : results) {
    std::printf("%8d  %-18s %10.2f %10.2f", r.requests, r.name.c_str(), r.p50_us, r.p99_us);
    if (!r.beside.empty()) std::printf(" %10.2f  %s", r.over_us, r.beside.c_str());
    if (r.goal_us > 0) std::printf(", %.2f: %s", r.goal_us, r.over_us <= r.goal_us ? "met" : "missed");
    std::printf("\n");
  }
}

int Main(const Options& options) {
  const auto first = Get("connect", Client::Connect(options.address));
  Client::Options limits;
  limits.max_message_bytes = Get("GetConfig", first->GetServerInfo()).max_message_bytes;
  const auto client = Get("connect", Client::Connect(options.address, limits));
  std::vector<Result> results;
  for (const int requests : {1, 256}) {
    for (Result& r : Bench(options, *client, requests).Run()) results.push_back(std::move(r));
  }
  Print(options, results);
  return 0;
}

}  // namespace
}  // namespace kvsummary

int main(int argc, char** argv) {
  kvsummary::Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    const std::string_view value = argument.substr(std::min(argument.find('=') + 1, argument.size()));
    if (argument == "--json") {
      options.json = true;
    } else if (argument.rfind("--address=", 0) == 0) {
      options.address = value;
    } else if (argument.rfind("--device=", 0) == 0) {
      options.device = value;
    } else if (argument.rfind("--layers=", 0) == 0 && std::atoi(value.data()) > 0) {
      options.layers = std::atoi(value.data());
    } else if (argument.rfind("--calls=", 0) == 0 && std::atoi(value.data()) > 0) {
      options.calls = std::atoi(value.data());
    } else {
      options.address.clear();
      break;
    }
  }
  if (options.address.empty()) {
    std::fprintf(
        stderr,
        "usage: bench_planes --address=ADDRESS [--device=host|cuda:N] [--layers=N] [--calls=N] [--json]\n");
    return 2;
  }
  return kvsummary::Main(options);
}
