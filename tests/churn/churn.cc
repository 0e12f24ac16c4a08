// Clients that publish, look up, load and release at random, and are killed at random, against a live daemon;
// the bytes of every page that is loaded are compared, and at the end the store's books must agree and
// nothing be pinned.
//
//   churn --address=unix:/tmp/s --seconds=600 [--clients=8] [--device=cuda:0] [--block-size=16] [--seed=1]
//
// Each client is a process. Prefixes come from a small tree that all share, so clients publish the same
// pages, load each other's and wait for nobody. What a page holds is a function of its namespace, group and
// hash: whatever is served under a hash can be checked. Exit status 0: all is well.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstring>
#include <new>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/client.h"
#include "client/session.h"
#include "client/status.h"
#include "kernels/layout.h"

namespace kvsummary {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::int64_t kChains = 400;      // prefixes; four share their first kShared blocks
constexpr std::int64_t kShared = 12;       // blocks
constexpr std::int64_t kChainBlocks = 48;  // blocks of a prefix
constexpr std::int64_t kCacheBlocks = 2 * kChainBlocks + 1;
constexpr int kHashWidth = 20;
constexpr int kGroups = 2;  // the first FULL, layer 0; the second WINDOW, layer 1

struct Flags {
  std::string address;
  std::string device;
  int seconds = 10;
  int clients = 8;
  int block_size = 16;
  std::uint64_t seed = 1;
};

// What the clients have done, in memory that outlives them.
struct Counts {
  std::atomic<std::int64_t> published{0}, stored{0}, lookups{0}, hits{0}, loads{0}, pages{0}, bad{0},
      refused{0}, expired{0}, no_room{0}, checks{0}, kills{0};
};

std::uint64_t Mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// What block `index` of a chain is known by.
std::uint64_t BlockKey(std::int64_t chain, std::int64_t index) {
  const std::int64_t owner = index < kShared ? chain / 4 * 4 : chain;
  return static_cast<std::uint64_t>(owner * kChainBlocks + index);
}

std::string Hash(std::uint64_t key) {
  std::string hash(kHashWidth, '\0');
  for (std::size_t i = 0; i < hash.size(); ++i) hash[i] = static_cast<char>(Mix(key * 64 + i));
  return hash;
}

std::string Hashes(std::int64_t chain, std::int64_t first, std::int64_t count) {
  std::string hashes;
  for (std::int64_t i = first; i < first + count; ++i) hashes += Hash(BlockKey(chain, i));
  return hashes;
}

void FillPage(std::uint64_t name_space, int group, std::uint64_t key, std::span<std::uint8_t> page) {
  std::uint64_t state = Mix(name_space * 1000003 + static_cast<std::uint64_t>(group)) ^ Mix(key);
  for (std::size_t i = 0; i < page.size(); i += sizeof(state)) {
    state = Mix(state);
    std::memcpy(page.data() + i, &state, sizeof(state));
  }
}

[[noreturn]] void Die(const std::string& what) {
  absl::FPrintF(stderr, "churn: %s\n", what);
  _exit(1);
}

void Must(const absl::Status& status, const char* call) {
  if (!status.ok()) Die(absl::StrCat(call, ": ", Describe(status)));
}

template <typename T>
T Must(absl::StatusOr<T> value, const char* call) {
  Must(value.status(), call);
  return *std::move(value);
}

// One client's life, until somebody kills it.
class Churner {
 public:
  Churner(const Flags& flags, Counts& counts, std::uint64_t seed)
      : counts_(counts),
        random_(seed),
        client_(Must(Client::Connect(flags.address), "Connect")),
        session_(Must(client_->OpenSession("churn"), "OpenSession")),
        name_space_(random_() % 3),
        page_bytes_(static_cast<std::size_t>(flags.block_size / kRegionTokens * kSummaryBytes)),
        block_size_(flags.block_size) {
    const auto bytes = static_cast<std::int64_t>(page_bytes_);
    cache_ =
        Must(session_->CreateCache(absl::StrCat("churn-", std::random_device()(), "-", seed), flags.device,
                                   {.layers = kGroups,
                                    .blocks = kCacheBlocks,
                                    .block_size = flags.block_size,
                                    .ring_blocks = 2,
                                    .capacity = 8}),
             "CreateCache");
    namespace_id_ =
        Must(session_->DeclareNamespace({.identity = {.model = "churn",
                                                      .layers = kGroups,
                                                      .block_size = flags.block_size,
                                                      .layout_version = 1,
                                                      .salt = absl::StrCat("salt ", name_space_)},
                                         .hash_width = kHashWidth,
                                         .groups = {{.kind = GroupKind::kFull, .bytes_per_block = bytes},
                                                    {.kind = GroupKind::kWindow,
                                                     .window_tokens = 3 * std::int64_t{flags.block_size},
                                                     .bytes_per_block = bytes}}}),
             "DeclareNamespace");
    const std::int64_t stride = cache_.geometry.block_stride;
    Must(session_->BindCache(
             cache_, namespace_id_,
             std::vector<GroupViews>{{0, {{0, 0, stride, bytes}}}, {1, {{0, bytes, stride, bytes}}}}),
         "BindCache");
  }

  // Ends when it ends itself, as a client that crashes does.
  void Run() {
    for (;;) {
      const std::uint64_t what = Below(1000);
      if (what < 350) {
        Publish();
      } else if (what < 900) {
        LookUp();
      } else if (what < 990) {
        BeRefused();
      } else if (what < 997) {
        const auto report = Must(client_->Check(), "Check");
        if (!report.faults.empty()) Die("Check: " + report.faults.front());
        ++counts_.checks;
      } else {
        _exit(0);
      }
    }
  }

 private:
  std::uint64_t Below(std::uint64_t end) { return random_() % end; }
  std::int64_t Index(std::int64_t end) {
    return static_cast<std::int64_t>(Below(static_cast<std::uint64_t>(end)));
  }

  // Whether a call was answered; what may happen to any client is counted.
  bool Answered(const absl::Status& status, const char* call) {
    if (status.ok()) return true;
    const std::string reason = ReasonOf(status);
    if (reason == "LEASE_NOT_FOUND") {
      ++counts_.expired;
    } else if (absl::IsResourceExhausted(status)) {
      ++counts_.no_room;
    } else {
      Must(status, call);
    }
    return false;
  }

  std::vector<std::int64_t> Blocks(std::int64_t first, std::int64_t count) {
    std::vector<std::int64_t> blocks;
    for (std::int64_t i = 0; i < count; ++i) blocks.push_back(first + i);
    std::shuffle(blocks.begin(), blocks.end(), random_);
    return blocks;
  }

  // Makes a stretch of a prefix in the first half of the cache, and publishes it. The next one writes over
  // it.
  void Publish() {
    const std::int64_t chain = Index(kChains);
    const std::int64_t first = Below(3) == 0 ? Index(kChainBlocks) : 0;
    const std::int64_t count = 1 + Index(kChainBlocks - first);
    std::array<std::vector<std::int64_t>, kGroups> blocks;
    std::vector<GroupBlocks> groups;
    for (int group = 0; group < kGroups; ++group) {
      auto& ids = blocks[static_cast<std::size_t>(group)];
      ids = Blocks(1, count);
      std::vector<std::uint8_t> pages(static_cast<std::size_t>(count) * page_bytes_);
      for (std::int64_t i = 0; i < count; ++i) {
        FillPage(name_space_, group, BlockKey(chain, first + i), Page(pages, i));
      }
      Must(client_->WritePages(cache_, ids, {group, 1}, pages), "WritePages");
      if (group == 1 && Below(2) == 0) ids[static_cast<std::size_t>(Index(count))] = -1;
      groups.push_back({.group = group, .blocks = ids});
    }
    const auto result = session_->Publish(cache_, namespace_id_,
                                          {.committed_tokens = (first + count) * block_size_,
                                           .first_block_index = first,
                                           .parent_hash = first == 0 ? "" : Hash(BlockKey(chain, first - 1)),
                                           .hashes = Hashes(chain, first, count),
                                           .groups = groups,
                                           .request_id = Below(2) * random_()});
    ++counts_.published;
    if (Answered(result.status(), "Publish")) counts_.stored += result->stored;
  }

  // Looks a prefix up and does something with the lease; sometimes nothing, and it is left behind.
  void LookUp() {
    const std::int64_t chain = Index(kChains);
    const std::int64_t count = 1 + Index(kChainBlocks);
    const auto lease = std::chrono::milliseconds(Below(8) == 0 ? 1 + Index(5) : Index(20'000));
    const auto hit = session_->Lookup(namespace_id_, Hashes(chain, 0, count), cache_.device, lease);
    ++counts_.lookups;
    if (!Answered(hit.status(), "Lookup") || hit->hit_blocks == 0) return;
    if (hit->hit_blocks > count) Die("Lookup: more blocks than were asked for");
    ++counts_.hits;
    if (Below(4) == 0) Answered(session_->RenewLease(hit->lease_id, lease).status(), "RenewLease");
    if (Below(4) != 0) Load(chain, *hit);
    if (Below(50) != 0) Must(session_->ReleaseLease(hit->lease_id), "ReleaseLease");
  }

  // Loads what was found into the second half of the cache and compares it.
  void Load(std::int64_t chain, const PrefixHit& hit) {
    std::array<std::vector<std::int64_t>, kGroups> blocks;
    std::vector<GroupBlocks> groups;
    for (const GroupHit& group : hit.groups) {
      auto& ids = blocks[static_cast<std::size_t>(group.group)];
      ids = Blocks(kChainBlocks + 1, hit.hit_blocks - group.first_block_index);
      groups.push_back({.group = group.group, .blocks = ids, .first_block_index = group.first_block_index});
    }
    const auto loaded = session_->Load(cache_, namespace_id_, {.lease_id = hit.lease_id, .groups = groups});
    if (!Answered(loaded.status(), "Load")) return;
    ++counts_.loads;
    counts_.pages += loaded->loaded;
    std::vector<std::uint8_t> expected(page_bytes_);
    for (const GroupBlocks& group : groups) {
      std::vector<bool> good(group.blocks.size(), true);
      for (const BadBlocks& bad : loaded->bad) {
        if (bad.group != group.group) continue;
        for (const std::int64_t index : bad.block_indexes) {
          good[static_cast<std::size_t>(index - group.first_block_index)] = false;
          ++counts_.bad;
        }
      }
      auto pages = Must(client_->ReadPages(cache_, group.blocks, {group.group, 1}), "ReadPages");
      for (std::size_t i = 0; i < good.size(); ++i) {
        const std::int64_t index = group.first_block_index + static_cast<std::int64_t>(i);
        FillPage(name_space_, group.group, BlockKey(chain, index), expected);
        const auto page = Page(pages, static_cast<std::int64_t>(i));
        if (good[i] && !std::equal(expected.begin(), expected.end(), page.begin())) {
          Die(absl::StrFormat(
              "namespace %d, group %d, block %d of prefix %d: the bytes loaded are not its own", name_space_,
              group.group, index, chain));
        }
      }
    }
  }

  // Calls that must be refused.
  void BeRefused() {
    const std::vector<std::int64_t> block = {1 + Index(kCacheBlocks - 1)};
    const std::vector<std::int64_t> null_block = {0};
    const std::vector<GroupBlocks> group = {{.group = 0, .blocks = block}};
    const std::vector<GroupBlocks> null_group = {{.group = 0, .blocks = null_block}};
    const std::string hash = Hash(random_());
    PublishBlocks publish{.committed_tokens = block_size_,
                          .first_block_index = 0,
                          .parent_hash = {},
                          .hashes = hash,
                          .groups = group};
    absl::Status status;
    switch (Below(6)) {
      case 0:
        publish.groups = null_group;
        break;
      case 1:
        publish.committed_tokens = block_size_ - 1;
        break;
      case 2:
        publish.hashes = std::string_view(hash).substr(1);
        break;
      case 3:
        publish.parent_hash = hash;
        break;
      case 4:
        status = session_->Load(cache_, namespace_id_, {.lease_id = random_() | 1, .groups = group}).status();
        break;
      default:
        status = session_->Lookup(namespace_id_ + 1 + Below(100), hash, "", std::chrono::seconds(1)).status();
    }
    if (status.ok()) status = session_->Publish(cache_, namespace_id_, publish).status();
    if (status.ok()) Die("a call was taken that had to be refused");
    ++counts_.refused;
  }

  std::span<std::uint8_t> Page(std::vector<std::uint8_t>& pages, std::int64_t index) const {
    return std::span(pages).subspan(static_cast<std::size_t>(index) * page_bytes_, page_bytes_);
  }

  Counts& counts_;
  std::mt19937_64 random_;
  const std::unique_ptr<Client> client_;
  const std::unique_ptr<ClientSession> session_;
  const std::uint64_t name_space_;
  const std::size_t page_bytes_;
  const std::int64_t block_size_;
  Cache cache_;
  std::uint64_t namespace_id_ = 0;
};

// No gRPC before this: it does not survive a fork.
pid_t Spawn(const Flags& flags, Counts& counts, std::uint64_t seed) {
  const pid_t pid = fork();
  if (pid < 0) Die("fork failed");
  if (pid > 0) return pid;
  Churner(flags, counts, seed).Run();
  _exit(0);
}

// Whether the process ended as it may: killed, or by itself.
bool EndedWell(int status) {
  return WIFSIGNALED(status) ? WTERMSIG(status) == SIGKILL : WEXITSTATUS(status) == 0;
}

void AwaitSessionsGone(Client& client) {
  const auto deadline = Clock::now() + std::chrono::seconds(30);
  for (;;) {
    const auto sessions = Must(client.ListSessions(), "ListSessions");
    if (std::ranges::none_of(sessions, [](const SessionSummary& s) { return s.name == "churn"; })) return;
    if (Clock::now() > deadline) Die("sessions of dead clients are still there");
  }
}

int Run(const Flags& flags) {
  void* shared = mmap(nullptr, sizeof(Counts), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) Die("mmap failed");
  Counts& counts = *new (shared) Counts;
  sigset_t child_ended;
  sigemptyset(&child_ended);
  sigaddset(&child_ended, SIGCHLD);
  sigprocmask(SIG_BLOCK, &child_ended, nullptr);

  std::mt19937_64 random(flags.seed);
  std::vector<pid_t> clients;
  for (int i = 0; i < flags.clients; ++i) clients.push_back(Spawn(flags, counts, random()));
  bool well = true;
  const auto end = Clock::now() + std::chrono::seconds(flags.seconds);
  while (well && Clock::now() < end) {
    const timespec pause{0, static_cast<std::int64_t>(20'000'000 + random() % 400'000'000)};
    if (sigtimedwait(&child_ended, nullptr, &pause) < 0) {
      kill(clients[random() % clients.size()], SIGKILL);
      ++counts.kills;
    }
    int status = 0;
    for (pid_t& client : clients) {
      if (waitpid(client, &status, WNOHANG) != client) continue;
      well = well && EndedWell(status);
      client = Spawn(flags, counts, random());
    }
  }
  for (const pid_t client : clients) kill(client, SIGKILL);
  for (const pid_t client : clients) {
    int status = 0;
    waitpid(client, &status, 0);
    well = well && EndedWell(status);
  }

  const auto client = Must(Client::Connect(flags.address), "Connect");
  AwaitSessionsGone(*client);
  const auto report = Must(client->Check(), "Check");
  for (const std::string& fault : report.faults) absl::FPrintF(stderr, "FAULT: %s\n", fault);
  well = well && report.faults.empty() && report.store.leases == 0;
  for (const StoreTier& tier : report.store.tiers) {
    absl::PrintF("%s: %d pages, pinned %d, evicted %d, demoted %d, promoted %d\n", tier.name, tier.pages,
                 tier.pinned_bytes, tier.evicted_pages, tier.demoted_pages, tier.promoted_pages);
    well = well && tier.pinned_bytes == 0;
  }
  absl::PrintF(
      "%d s, %d clients, %d kills: %d publishes, %d pages stored; %d lookups, %d hits; %d loads of %d pages, "
      "%d bad; "
      "%d calls refused as they must, %d leases expired, %d times no room, %d checks, %d leases left: %s\n",
      flags.seconds, flags.clients, counts.kills.load(), counts.published.load(), counts.stored.load(),
      counts.lookups.load(), counts.hits.load(), counts.loads.load(), counts.pages.load(), counts.bad.load(),
      counts.refused.load(), counts.expired.load(), counts.no_room.load(), counts.checks.load(),
      report.store.leases, well ? "clean" : "NOT CLEAN");
  return well ? 0 : 1;
}

bool Set(const std::string& argument, Flags& flags) {
  const auto equals = argument.find('=');
  if (equals == std::string::npos) return false;
  const std::string name = argument.substr(0, equals);
  const std::string value = argument.substr(equals + 1);
  if (name == "--address") return flags.address = value, true;
  if (name == "--device") return flags.device = value, true;
  if (name == "--seconds") return absl::SimpleAtoi(value, &flags.seconds);
  if (name == "--clients") return absl::SimpleAtoi(value, &flags.clients) && flags.clients > 0;
  if (name == "--block-size") return absl::SimpleAtoi(value, &flags.block_size);
  if (name == "--seed") return absl::SimpleAtoi(value, &flags.seed);
  return false;
}

}  // namespace
}  // namespace kvsummary

int main(int argc, char** argv) {
  kvsummary::Flags flags;
  for (int i = 1; i < argc; ++i) {
    if (kvsummary::Set(argv[i], flags)) continue;
    absl::FPrintF(stderr, "churn: bad argument %s\n", argv[i]);
    return 2;
  }
  if (flags.address.empty()) return absl::FPrintF(stderr, "churn: --address is missing\n"), 2;
  return kvsummary::Run(flags);
}
