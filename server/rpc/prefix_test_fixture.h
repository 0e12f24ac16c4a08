// A real server with a page store on host memory, and workers that use it over gRPC.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "kernels/update.h"
#include "server/rpc/server.h"
#include "server/rpc/test_client.h"

namespace kvsummary {

inline constexpr std::int64_t kBlockTokens = 16;
inline constexpr std::int64_t kPageBytes = 2 * kBlockTokens / 8 * 256;  // two layers
inline constexpr std::size_t kHashWidth = 16;

using Stub = v1::PrefixService::Stub;

// The hash that the tests name a prefix's block by.
inline std::string HashOf(int prefix, int block) {
  std::string hash = std::to_string(prefix) + "/" + std::to_string(block);
  hash.insert(0, kHashWidth - hash.size(), ' ');
  return hash;
}
inline std::string HashesOf(int prefix, int first, int count) {
  std::string hashes;
  for (int i = first; i < first + count; ++i) hashes += HashOf(prefix, i);
  return hashes;
}

// What every page of the tests holds: told by a number.
inline std::string PageOf(int content, std::int64_t bytes = kPageBytes) {
  std::string page(static_cast<std::size_t>(bytes), '\0');
  for (std::size_t i = 0; i < page.size(); ++i) {
    page[i] = static_cast<char>(static_cast<std::size_t>(content) * 31 + i * 7 + i / 256);
  }
  return page;
}

// A client with a session, a cache and a namespace that the cache is bound to.
struct Worker {
  TestClient client;
  v1::CacheRef cache;
  std::int64_t block_stride = 0;  // of the cache
  std::uint64_t name_space = 0;

  explicit Worker(const std::string& address) : client(address) {}

  template <typename Request, typename Reply>
  grpc::Status Call(grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Reply*),
                    const Request& request, Reply* reply) {
    grpc::ClientContext context;
    return (client.prefixes.get()->*method)(&context, request, reply);
  }

  v1::DeclareNamespaceRequest DeclareRequest(const std::string& salt = "salt") const {
    v1::DeclareNamespaceRequest request;
    request.set_session_id(client.session_id);
    auto* identity = request.mutable_identity();
    identity->set_model("model");
    identity->set_layers(2);
    identity->set_block_size(kBlockTokens);
    identity->set_layout_version(1);
    identity->set_salt(salt);
    request.set_hash_width(kHashWidth);
    auto* group = request.add_groups();
    group->set_kind(v1::GROUP_KIND_FULL);
    group->set_bytes_per_block(kPageBytes);
    return request;
  }
  grpc::Status Declare(const v1::DeclareNamespaceRequest& request, std::uint64_t* id) {
    v1::DeclareNamespaceResponse reply;
    const auto status = Call(&Stub::DeclareNamespace, request, &reply);
    *id = reply.namespace_id();
    return status;
  }
  v1::BindCacheRequest BindRequest() const {
    v1::BindCacheRequest request;
    request.set_session_id(client.session_id);
    *request.mutable_cache() = cache;
    request.set_namespace_id(name_space);
    return request;
  }
  grpc::Status Bind(const v1::BindCacheRequest& request) {
    v1::BindCacheResponse reply;
    return Call(&Stub::BindCache, request, &reply);
  }

  // Sets all of blocks' pages; block ids[i] gets content first_content + i.
  void Write(const std::vector<std::int64_t>& ids, int first_content) {
    v1::WritePagesRequest request;
    *request.mutable_cache() = cache;
    request.mutable_layers()->set_count(2);
    for (std::size_t i = 0; i < ids.size(); ++i) {
      request.add_blocks(ids[i]);
      request.mutable_data()->append(PageOf(first_content + static_cast<int>(i)));
    }
    v1::WritePagesResponse reply;
    grpc::ClientContext context;
    const auto status = client.caches->WritePages(&context, request, &reply);
    ASSERT_TRUE(status.ok()) << status.error_message();
  }
  std::string Read(std::int64_t block) {
    v1::ReadPagesRequest request;
    *request.mutable_cache() = cache;
    request.add_blocks(block);
    request.mutable_layers()->set_count(2);
    grpc::ClientContext context;
    const auto reader = client.caches->ReadPages(&context, request);
    std::string data;
    v1::ReadPagesResponse part;
    while (reader->Read(&part)) data += part.data();
    const auto status = reader->Finish();
    EXPECT_TRUE(status.ok()) << status.error_message();
    return data;
  }

  v1::PublishRequest PublishRequest(int prefix, int first, const std::vector<std::int64_t>& ids) const {
    v1::PublishRequest request;
    request.set_session_id(client.session_id);
    *request.mutable_cache() = cache;
    request.set_namespace_id(name_space);
    request.set_committed_tokens((first + std::ssize(ids)) * kBlockTokens);
    request.set_first_block_index(first);
    if (first > 0) request.set_parent_hash(HashOf(prefix, first - 1));
    request.set_hashes(HashesOf(prefix, first, static_cast<int>(ids.size())));
    auto* group = request.add_groups();
    for (const std::int64_t id : ids) group->add_block_ids(id);
    return request;
  }
  grpc::Status Publish(const v1::PublishRequest& request, v1::PublishResponse* reply) {
    return Call(&Stub::Publish, request, reply);
  }
  std::string PublishReason(const v1::PublishRequest& request) {
    v1::PublishResponse reply;
    return ReasonOf(Publish(request, &reply));
  }
  // Publishes blocks of a prefix from block `first` on; all must be stored.
  void MustPublish(int prefix, int first, const std::vector<std::int64_t>& ids) {
    v1::PublishResponse reply;
    const auto status = Publish(PublishRequest(prefix, first, ids), &reply);
    ASSERT_TRUE(status.ok()) << status.error_message();
    ASSERT_EQ(reply.stored(), std::ssize(ids));
  }

  v1::LookupRequest LookupRequest(const std::string& hashes) const {
    v1::LookupRequest request;
    request.set_session_id(client.session_id);
    request.set_namespace_id(name_space);
    request.set_hashes(hashes);
    request.set_device("host");
    request.set_lease_milliseconds(10'000);
    return request;
  }
  grpc::Status Lookup(const v1::LookupRequest& request, v1::LookupResponse* reply) {
    return Call(&Stub::Lookup, request, reply);
  }
  v1::LookupResponse MustLookup(const std::string& hashes) {
    v1::LookupResponse reply;
    const auto status = Lookup(LookupRequest(hashes), &reply);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return reply;
  }

  v1::LoadRequest LoadRequest(std::uint64_t lease, int first, const std::vector<std::int64_t>& ids) const {
    v1::LoadRequest request;
    request.set_session_id(client.session_id);
    request.set_namespace_id(name_space);
    request.set_lease_id(lease);
    *request.mutable_cache() = cache;
    auto* group = request.add_groups();
    group->set_first_block_index(first);
    for (const std::int64_t id : ids) group->add_block_ids(id);
    return request;
  }
  grpc::Status Load(const v1::LoadRequest& request, v1::LoadResponse* reply) {
    return Call(&Stub::Load, request, reply);
  }
  std::string LoadReason(const v1::LoadRequest& request) {
    v1::LoadResponse reply;
    return ReasonOf(Load(request, &reply));
  }
  std::string Release(std::uint64_t lease) {
    v1::ReleaseLeaseRequest request;
    request.set_session_id(client.session_id);
    request.set_lease_id(lease);
    v1::ReleaseLeaseResponse reply;
    return ReasonOf(Call(&Stub::ReleaseLease, request, &reply));
  }
  std::string Renew(std::uint64_t lease, std::int64_t milliseconds) {
    v1::RenewLeaseRequest request;
    request.set_session_id(client.session_id);
    request.set_lease_id(lease);
    request.set_lease_milliseconds(milliseconds);
    v1::RenewLeaseResponse reply;
    return ReasonOf(Call(&Stub::RenewLease, request, &reply));
  }
};

class PrefixTest : public ::testing::Test {
 protected:
  PrefixTest() {
    if (mkdtemp(dir_.data()) == nullptr) std::abort();
    std::vector<std::unique_ptr<Device>> devices;
    devices.push_back(MakeHostDevice(HostKernels(), 256 << 20));
    caches_ = std::make_unique<CacheManager>(std::move(devices), 1000);
    options_.listen = {"unix:" + dir_ + "/s"};
    options_.store.host_bytes = 8 << 20;
    options_.store.now = [this] {
      const auto now = PageStore::Clock::time_point(std::chrono::milliseconds(now_ms_.load()));
      ++clock_reads_;
      return now;
    };
  }
  ~PrefixTest() override {
    workers_.clear();
    server_.reset();
    std::filesystem::remove_all(dir_);
  }

  void Start() {
    auto server = Server::Start(options_, *caches_);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }
  // With a session, the cache "worker-N" and the namespace of the salt, bound.
  Worker& NewWorker(const std::string& salt = "salt") {
    if (server_ == nullptr) Start();
    Worker& worker = *workers_.emplace_back(std::make_unique<Worker>(server_->addresses()[0]));
    v1::CacheInfo info;
    EXPECT_EQ(ReasonOf(worker.client.Open("worker")), "OK");
    EXPECT_EQ(ReasonOf(worker.client.Create("worker-" + std::to_string(++made_), &info)), "OK");
    worker.cache = info.cache();
    worker.block_stride = info.geometry().block_stride();
    EXPECT_EQ(ReasonOf(worker.Declare(worker.DeclareRequest(salt), &worker.name_space)), "OK");
    EXPECT_EQ(ReasonOf(worker.Bind(worker.BindRequest())), "OK");
    return worker;
  }

  v1::CheckResponse Check() {
    TestClient client(server_->addresses()[0]);
    grpc::ClientContext context;
    v1::CheckResponse reply;
    EXPECT_TRUE(client.admin->Check(&context, {}, &reply).ok());
    return reply;
  }
  void ExpectClean() {
    const auto check = Check();
    EXPECT_TRUE(check.faults().empty()) << check.faults(0);
    for (const auto& tier : check.store().tiers()) {
      EXPECT_EQ(tier.pinned_bytes() + tier.unpinned_bytes() + tier.free_bytes(), tier.capacity_bytes());
    }
  }
  std::int64_t Pinned() {
    const auto check = Check();
    std::int64_t bytes = 0;
    for (const auto& tier : check.store().tiers()) bytes += tier.pinned_bytes();
    return bytes;
  }
  void AwaitSessions(std::size_t count) {
    while (server_->sessions().List().size() != count) std::this_thread::yield();
  }

  // After that the store has taken note that the cache's session has ended.
  void AwaitDetached(const std::string& name) {
    while ((*caches_->Find(name))->attached()) std::this_thread::yield();
  }

  // Holds the host's executor: what is queued there happens when the answer is set.
  std::promise<void> HoldExecutor() {
    std::promise<void> release;
    std::promise<void> held;
    auto status = caches_->devices()[0]->executor().Submit([&held, until = release.get_future()]() mutable {
      held.set_value();
      until.wait();
    });
    EXPECT_TRUE(status.ok()) << status;
    held.get_future().wait();
    return release;
  }

  // A counter in a buffer of the worker's session.
  struct SharedCounter {
    std::uint64_t* word = nullptr;
    v1::CounterValue value;
    void Set(std::uint64_t to) { std::atomic_ref<std::uint64_t>(*word).store(to, std::memory_order_release); }
    std::uint64_t Get() { return std::atomic_ref<std::uint64_t>(*word).load(std::memory_order_acquire); }
  };
  // A memfd of 64 KiB registered as a buffer, and mapped here.
  static std::pair<std::uint64_t, char*> RegisterBuffer(Worker& worker) {
    constexpr std::int64_t kBytes = 64 << 10;
    const Descriptor memfd = MakeMemfd(kBytes);
    v1::RegisterBufferResponse reply;
    EXPECT_EQ(ReasonOf(worker.client.RegisterMemfd(kBytes, &reply)), "OK");
    EXPECT_EQ(Redeem(worker.client.descriptor_socket, reply.ticket(), memfd.get()).reason, "OK");
    void* data = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, memfd.get(), 0);
    return {reply.buffer_id(), static_cast<char*>(data)};
  }
  static SharedCounter MakeCounter(Worker& worker, std::uint64_t value) {
    const auto [id, data] = RegisterBuffer(worker);
    SharedCounter counter;
    counter.word = reinterpret_cast<std::uint64_t*>(data);
    counter.value.set_buffer_id(id);
    counter.value.set_value(value);
    return counter;
  }

  std::atomic<std::int64_t> now_ms_{1000};
  std::atomic<std::int64_t> clock_reads_{0};
  std::string dir_ = "/tmp/kvs-XXXXXX";
  std::unique_ptr<CacheManager> caches_;
  Server::Options options_;
  std::unique_ptr<Server> server_;
  std::vector<std::unique_ptr<Worker>> workers_;
  int made_ = 0;
};

}  // namespace kvsummary
