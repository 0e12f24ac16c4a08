// An engine, devices and hashes for the tests of the store.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/device/device.h"
#include "server/store/page_store.h"

namespace kvsummary::testing {

// Host memory behind any name, whose movements a test can hold up, watch or make fail.
class FakeDevice final : public Device {
 public:
  // Called before each movement; what is not OK is its answer.
  using Hook = std::function<absl::Status(std::size_t pages)>;

  explicit FakeDevice(std::string name) : Device(std::move(name), std::int64_t{1} << 32) {}
  ~FakeDevice() override { executor().Stop(); }

  std::string description() const override { return "test"; }
  absl::StatusOr<std::unique_ptr<Memory>> Allocate(std::int64_t bytes, MemoryKind) override {
    auto memory = AllocateHostMemory(bytes);
    if (memory.ok()) allocated_.push_back((*memory)->data());
    return memory;
  }
  absl::Status Apply(const CacheView&, const Step&, RowsIn) override { return absl::OkStatus(); }
  absl::Status CopyOut(const Memory&, std::span<const Piece>, char*) override { return absl::OkStatus(); }
  absl::Status CopyIn(Memory&, std::span<const Piece>, const char*) override { return absl::OkStatus(); }
  absl::StatusOr<std::chrono::nanoseconds> MovePages(const PageSet& from,
                                                     std::span<const std::int64_t> from_ids,
                                                     const PageSet& to,
                                                     std::span<const std::int64_t> to_ids) override {
    ++movements_;
    if (hook_) {
      if (auto s = hook_(from_ids.size()); !s.ok()) return s;
    }
    return Device::MovePages(from, from_ids, to, to_ids);
  }

  // While the executor is idle, or from it.
  void set_hook(Hook hook) { hook_ = std::move(hook); }
  int movements() const { return movements_; }
  // What has been allocated of it, in order.
  char* allocated(std::size_t i) const { return static_cast<char*>(allocated_[i]); }

  // Runs on the executor and waits.
  void Run(std::function<void()> work) {
    std::promise<void> ran;
    executor().SubmitFree([&] {
      work();
      ran.set_value();
    });
    ran.get_future().wait();
  }

 private:
  absl::Status DoOpen() override { return absl::OkStatus(); }

  Hook hook_;
  std::atomic<int> movements_ = 0;
  std::vector<void*> allocated_;
};

// Holds a device's executor up from its making until Open, or its end.
class Gate {
 public:
  explicit Gate(Device& device) {
    device.executor().SubmitFree([open = open_.get_future().share(), &entered = entered_] {
      entered.set_value();
      open.wait();
    });
    entered_.get_future().wait();
  }
  ~Gate() { Open(); }
  void Open() {
    if (!std::exchange(opened_, true)) open_.set_value();
  }

 private:
  std::promise<void> open_;
  std::promise<void> entered_;
  bool opened_ = false;
};

// The hash of block `block` of a prefix. Prefixes share their first `shared` blocks with prefix 0.
inline std::string HashOf(std::uint64_t prefix, std::uint64_t block, int width = 32,
                          std::uint64_t shared = 0) {
  std::string hash(static_cast<std::size_t>(width), '\0');
  std::uint64_t word = (block < shared ? 0 : prefix) * 0x9e3779b97f4a7c15 + block + 1;
  for (std::size_t i = 0; i < hash.size(); i += sizeof(word)) {
    word ^= word >> 29;
    word *= 0xbf58476d1ce4e5b9;
    word ^= word >> 32;
    std::memcpy(&hash[i], &word, std::min(sizeof(word), hash.size() - i));
  }
  return hash;
}

inline std::string HashesOf(std::uint64_t prefix, std::int64_t first, std::int64_t count, int width = 32,
                            std::uint64_t shared = 0) {
  std::string hashes;
  for (std::int64_t i = first; i < first + count; ++i) {
    hashes += HashOf(prefix, static_cast<std::uint64_t>(i), width, shared);
  }
  return hashes;
}

// Bytes that only the page of this hash and group has.
inline std::string BytesOf(const std::string& hash, std::int32_t group, std::int64_t bytes) {
  std::uint64_t word = static_cast<std::uint64_t>(group) + 1;
  for (const char c : hash) word = word * 0x100000001b3 + static_cast<unsigned char>(c);
  std::string out(static_cast<std::size_t>(bytes), '\0');
  for (char& c : out) {
    word = word * 6364136223846793005 + 1442695040888963407;
    c = static_cast<char>(word >> 56);
  }
  return out;
}

inline NamespaceSpec SimpleSpec(std::int64_t bytes_per_block = 512, int width = 32) {
  NamespaceSpec spec;
  spec.key.model = "step-5";
  spec.key.layers = 1;
  spec.key.block_size = 64;
  spec.hash_width = width;
  spec.groups = {{.bytes_per_block = bytes_per_block}};
  return spec;
}

// An engine's cache of all groups of a namespace: the pages of a group lie as `parts` views apart, with gaps.
class Engine {
 public:
  static constexpr char kEmpty = '\x5a';

  Engine(Device& device, const NamespaceSpec& spec, std::int64_t blocks, int parts = 1) : spec_(spec) {
    bound_.device = &device;
    bound_.blocks = blocks;
    bound_.block_size = spec.key.block_size;
    std::int64_t offset = 0;
    for (const GroupSpec& group : spec.groups) {
      BoundCache::Group& g = bound_.groups.emplace_back();
      if (group.kind == GroupKind::kRing) continue;
      const std::int64_t part = group.bytes_per_block / parts / 16 * 16;
      for (int p = 0; p < parts; ++p) {
        const std::int64_t bytes = p + 1 < parts ? part : group.bytes_per_block - part * (parts - 1);
        g.views.push_back({offset, bytes + 32, bytes});
        offset += (bytes + 32) * blocks + 64;
      }
    }
    memory_ = std::make_shared<std::vector<char>>(static_cast<std::size_t>(offset), kEmpty);
    for (auto& g : bound_.groups) g.base = reinterpret_cast<std::uint8_t*>(memory_->data());
    bound_.memory = memory_;
  }

  const NamespaceSpec& spec() const { return spec_; }
  const BoundCache& bound() const { return bound_; }

  void Write(std::int32_t group, std::int64_t block, const std::string& bytes) {
    std::size_t at = 0;
    for (const PageView& v : bound_.groups[static_cast<std::size_t>(group)].views) {
      std::memcpy(memory_->data() + v.offset + block * v.block_stride, bytes.data() + at,
                  static_cast<std::size_t>(v.bytes));
      at += static_cast<std::size_t>(v.bytes);
    }
  }
  std::string Read(std::int32_t group, std::int64_t block) const {
    std::string bytes;
    for (const PageView& v : bound_.groups[static_cast<std::size_t>(group)].views) {
      bytes.append(memory_->data() + v.offset + block * v.block_stride, static_cast<std::size_t>(v.bytes));
    }
    return bytes;
  }
  bool Untouched(std::int32_t group, std::int64_t block) const {
    const std::string bytes = Read(group, block);
    return bytes == std::string(bytes.size(), kEmpty);
  }

 private:
  const NamespaceSpec spec_;
  BoundCache bound_;
  std::shared_ptr<std::vector<char>> memory_;
};

// A store, a session, and what engines do with it. Every test ends with a Check.
class StoreTest : public ::testing::Test {
 protected:
  using Published = absl::StatusOr<PublishResult>;
  using Loaded = absl::StatusOr<LoadResult>;
  using Cache = std::shared_ptr<const BoundCache>;
  static constexpr std::uint64_t kSession = 7;

  // Over a host and `gpus` other devices; in place of an earlier one.
  void Make(PageStore::Options options, int gpus = 0) {
    store_ = nullptr;
    devices_.clear();
    devices_.push_back(std::make_unique<FakeDevice>("host"));
    for (int i = 0; i < gpus; ++i)
      devices_.push_back(std::make_unique<FakeDevice>("cuda:" + std::to_string(i)));
    if (!real_clock_) options.now = [this] { return now_; };
    auto store = PageStore::Create(devices_, options);
    ASSERT_TRUE(store.ok()) << store.status();
    store_ = *std::move(store);
  }
  FakeDevice& device(std::size_t i) { return static_cast<FakeDevice&>(*devices_[i]); }

  void TearDown() override {
    if (store_ == nullptr) return;
    store_->Quiesce();
    EXPECT_EQ(store_->Check(), std::vector<std::string>());
    for (const TierUsage& tier : store_->stats().tiers) {
      EXPECT_EQ(tier.pinned_bytes + tier.unpinned_bytes + tier.free_bytes, tier.capacity_bytes) << tier.name;
    }
  }

  NamespaceId Declare(const NamespaceSpec& spec, std::uint64_t session = kSession) {
    const auto id = store_->Declare(session, spec);
    EXPECT_TRUE(id.ok()) << id.status();
    return id.value_or(NamespaceId{});
  }
  Cache Bind(NamespaceId ns, const Engine& engine, std::uint64_t session = kSession) {
    const auto bound = store_->Bind(session, ns, engine.bound());
    EXPECT_TRUE(bound.ok()) << bound.status();
    return bound.value_or(nullptr);
  }

  // Blocks [first, first + count) of a prefix, written into the engine's blocks 1, 2, ... of all stored
  // groups.
  static PublishArgs ArgsOf(const Cache& cache, Engine& engine, std::uint64_t prefix, std::int64_t first,
                            std::int64_t count, std::uint64_t session = kSession) {
    const int width = engine.spec().hash_width;
    PublishArgs args;
    args.session = session;
    args.name_space = cache->name_space;
    args.cache = cache;
    args.first_block_index = first;
    args.committed_tokens = (first + count) * cache->block_size;
    args.parent_hash = first > 0 ? HashOf(prefix, static_cast<std::uint64_t>(first) - 1, width) : "";
    args.hashes = HashesOf(prefix, first, count, width);
    for (std::size_t g = 0; g < engine.spec().groups.size(); ++g) {
      if (engine.spec().groups[g].kind == GroupKind::kRing) continue;
      GroupBlocks& list = args.groups.emplace_back();
      list.group = static_cast<std::int32_t>(g);
      for (std::int64_t i = 0; i < count; ++i) {
        engine.Write(list.group, i + 1, PageOf(engine.spec(), prefix, first + i, list.group));
        list.block_ids.push_back(i + 1);
      }
    }
    return args;
  }
  static std::string PageOf(const NamespaceSpec& spec, std::uint64_t prefix, std::int64_t block,
                            std::int32_t group = 0) {
    return BytesOf(HashOf(prefix, static_cast<std::uint64_t>(block), spec.hash_width), group,
                   spec.groups[static_cast<std::size_t>(group)].bytes_per_block);
  }
  std::future<Published> Start(PublishArgs args) {
    auto result = std::make_shared<std::promise<Published>>();
    store_->Publish(std::move(args), [result](Published r) { result->set_value(std::move(r)); });
    return result->get_future();
  }
  Published Run(PublishArgs args) { return Start(std::move(args)).get(); }
  // Publishes blocks [0, count) of a prefix from a cache of its own, and expects that all of them find room.
  void Store(NamespaceId ns, const NamespaceSpec& spec, Device& on, std::uint64_t prefix, std::int64_t count,
             std::uint64_t session = kSession) {
    Engine engine(on, spec, count + 1);
    const auto published = Run(ArgsOf(Bind(ns, engine, session), engine, prefix, 0, count, session));
    ASSERT_TRUE(published.ok()) << published.status();
    EXPECT_EQ(published->dropped, 0);
    store_->Quiesce();
  }

  absl::StatusOr<Hit> Find(NamespaceId ns, std::uint64_t prefix, std::int64_t count, int width = 32,
                           std::uint64_t session = kSession) {
    return store_->Lookup(
        {.session = session, .name_space = ns, .hashes = HashesOf(prefix, 0, count, width)});
  }
  // How many blocks of a prefix are there; holds no lease.
  std::int64_t Blocks(NamespaceId ns, std::uint64_t prefix, std::int64_t count, int width = 32,
                      std::uint64_t session = kSession) {
    const auto hit = Find(ns, prefix, count, width, session);
    EXPECT_TRUE(hit.ok()) << hit.status();
    if (!hit.ok() || hit->blocks == 0) return 0;
    store_->Release(session, hit->lease);
    return hit->blocks;
  }
  // All of a hit, block i into the cache's block i + 1.
  static LoadArgs LoadOf(const Hit& hit, const Cache& cache, std::uint64_t session = kSession) {
    LoadArgs args;
    args.session = session;
    args.lease = hit.lease;
    args.cache = cache;
    for (const GroupHit& group : hit.groups) {
      LoadGroup& list = args.groups.emplace_back();
      list.group = group.group;
      list.first_block_index = group.first_block_index;
      for (std::int64_t i = group.first_block_index; i < hit.blocks; ++i) list.block_ids.push_back(i + 1);
    }
    return args;
  }
  std::future<Loaded> Start(LoadArgs args) {
    auto result = std::make_shared<std::promise<Loaded>>();
    store_->Load(std::move(args), [result](Loaded r) { result->set_value(std::move(r)); });
    return result->get_future();
  }
  // Expects of a load of LoadOf that it has brought every page of the hit.
  static void ExpectLoaded(const Loaded& loaded, const Hit& hit, const Engine& engine, std::uint64_t prefix) {
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    for (std::size_t g = 0; g < hit.groups.size(); ++g) {
      EXPECT_TRUE(loaded->bad[g].empty());
      const GroupHit& group = hit.groups[g];
      for (std::int64_t i = group.first_block_index; i < hit.blocks; ++i) {
        EXPECT_TRUE(engine.Read(group.group, i + 1) == PageOf(engine.spec(), prefix, i, group.group))
            << "block " << i << " of group " << group.group;
      }
    }
  }
  // Looks a prefix up, loads what is there into a new cache, compares the bytes; answers the blocks.
  std::int64_t FindAndLoad(NamespaceId ns, const NamespaceSpec& spec, Device& on, std::uint64_t prefix,
                           std::int64_t count, std::uint64_t session = kSession) {
    const auto hit = Find(ns, prefix, count, spec.hash_width, session);
    EXPECT_TRUE(hit.ok()) << hit.status();
    if (!hit.ok() || hit->blocks == 0) return 0;
    Engine engine(on, spec, count + 1, 2);
    ExpectLoaded(Start(LoadOf(*hit, Bind(ns, engine, session), session)).get(), *hit, engine, prefix);
    store_->Release(session, hit->lease);
    store_->Quiesce();
    return hit->blocks;
  }
  std::int64_t TierPages(std::size_t tier) { return store_->stats().tiers[tier].pages; }

  bool real_clock_ = false;
  PageStore::Clock::time_point now_{};
  std::vector<std::unique_ptr<Device>> devices_;
  std::unique_ptr<PageStore> store_;
};

}  // namespace kvsummary::testing
