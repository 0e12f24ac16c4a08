// One Accept under way: what has to come into the cache, and what has come. Transports feed it; it writes on
// the cache's executor, and tells once when all is there or nothing will be written any more.
//
//   auto a = std::make_shared<Acceptance>(target, done);
//   a->Begin(facts);                       // refuses an offer that cannot fit, before a byte moves
//   a->AddPart(0, part);
//   a->Write(0, chunk, data, hold);        // bytes that the cache's device can address
//   a->WriteFromHost(0, chunk, data, hold);
//   a->SourceDone(committed_tokens);
//
// Every call may come from any thread. After a failure calls do nothing.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/handoff/bounce.h"
#include "server/handoff/move_parts.h"
#include "server/handoff/plan.h"

namespace kvsummary {

// Where a request goes.
struct AcceptTarget {
  std::shared_ptr<Cache> cache;
  std::vector<std::int64_t> blocks;  // from the request's first on
  std::int64_t ring_block = 0;
  std::int64_t resume = 0;
  std::shared_ptr<const BoundCache> bound = nullptr;
  std::vector<GroupSpec> group_specs = {};
  struct Group {
    std::int32_t group = 0;
    std::int64_t first = 0;
    std::vector<std::int64_t> blocks;
  };
  std::vector<Group> groups = {};
};

// What a source says of an offer at first.
struct OfferFacts {
  std::int32_t layers = 0;
  std::int32_t block_size = 0;  // of groups' blocks
  bool complete = false;
  std::int64_t committed_tokens = 0;         // when complete, as what follows
  std::vector<std::int64_t> positions = {};  // whose rows it has
};

struct Accepted {
  std::int64_t bytes = 0;  // written
  std::int64_t committed_tokens = 0;
  std::chrono::nanoseconds device_time{0};
};

class Acceptance : public std::enable_shared_from_this<Acceptance> {
 public:
  using Done = absl::AnyInvocable<void(absl::StatusOr<Accepted>) &&>;

  // Checks the target: LAYERS..., as Offers::Open names them; DUPLICATE_BLOCK; RESUME_OUT_OF_RANGE.
  static absl::Status Check(const AcceptTarget& target);
  // `target` has been checked. `bounces` must outlive it.
  Acceptance(AcceptTarget target, Bounces& bounces, Done done);

  Device& device() const { return target_.cache->device(); }
  const Wanted& wanted() const { return wanted_; }

  // GEOMETRY_DIFFERS, RESUME_OUT_OF_RANGE, RESUME_NOT_SERVABLE; MESSAGE_MALFORMED. Fails with what it
  // answers. May be called again, of the same offer.
  absl::Status Begin(const OfferFacts& facts);
  // Parts come in their order; one that has come before is ignored.
  absl::Status AddPart(std::int32_t number, Part part);

  // Whether a chunk, of a part that has come, is still to be brought. False for one that is not there.
  bool Wants(std::int32_t number, std::int64_t chunk) const;
  // Size of a chunk of a part that has come; 0 when there is none.
  std::int64_t BytesOfChunk(std::int32_t number, std::int64_t chunk) const;
  // A part that has come, or null. It does not change.
  const Part* FindPart(std::int32_t number) const;
  // Chunks of the parts that have come which are not wanted (any more): what a new source need not send.
  struct HeldRun {
    std::int32_t part = 0;
    std::int64_t first = 0;
    std::int64_t count = 0;
  };
  std::vector<HeldRun> Held() const;

  // Writes a chunk, if it is wanted, from memory that the cache's device can address, and keeps `hold` until
  // it has been read.
  void Write(std::int32_t number, std::int64_t chunk, const char* data, std::shared_ptr<const void> hold);
  // From any memory of the host.
  void WriteFromHost(std::int32_t number, std::int64_t chunk, const char* data,
                     std::shared_ptr<const void> hold);
  // A whole part in one movement, from memory that the device can address.
  void WritePart(std::int32_t number, const char* data, std::shared_ptr<const void> hold);

  // Every part has been added. It is done when every wanted chunk is written, or fails: HANDOFF_INCOMPLETE,
  // RESUME_NOT_SERVABLE.
  void SourceDone(std::int64_t committed_tokens);
  // Nothing more is written from now on; `done` comes when what is under way has ended.
  void Fail(const absl::Status& why);
  // OK while it goes on, and when it has succeeded.
  absl::Status status() const;

 private:
  struct Known {
    Part part;
    std::vector<bool> wanted;  // by chunk: and has not come yet
    std::int64_t left = 0;     // wanted chunks that are not written yet
  };

  absl::Status CheckResume(std::int64_t committed_tokens, const std::vector<std::int64_t>& positions) const;
  absl::Status CheckCoverage() const;
  void Run(std::int32_t number, std::int64_t first, std::int64_t count, const Chunk& chunk, const char* data,
           bool from_host, std::shared_ptr<const void> hold);
  absl::StatusOr<MovedPart> MoveNow(const Part& part, const Chunk& chunk, const char* data, bool from_host);
  void Queue(Executor::Work work);
  void Written(std::int32_t number, std::int64_t chunks, const absl::StatusOr<MovedPart>& moved);
  // Calls done when it is time. With `lock` held, which it gives up.
  void EndIfOver(std::unique_lock<std::mutex> lock);

  const AcceptTarget target_;
  Bounces& bounces_;
  Wanted wanted_;
  PartPlace place_;
  mutable std::mutex mutex_;
  Done done_;
  bool told_ = false;
  bool source_done_ = false;
  absl::Status status_;
  std::int64_t under_way_ = 0;  // writes, waiting ones too
  std::size_t queued_ = 0;      // of them, on the executor
  std::deque<Executor::Work> waiting_;
  std::int64_t chunks_ = 0;                    // of all parts
  std::vector<std::unique_ptr<Known>> parts_;  // by number
  std::vector<std::int64_t> regions_;          // known parts have, by layer
  std::map<std::int32_t, std::vector<Wanted::Run>> group_runs_;
  std::vector<std::int64_t> positions_;
  Accepted accepted_;
};

}  // namespace kvsummary
