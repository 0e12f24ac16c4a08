#include "client/session.h"

#include <sys/eventfd.h>
#include <sys/stat.h>

#include <cstddef>
#include <cstring>
#include <string>
#include <vector>

#include "client/fake_daemon.h"
#include "client/fake_descriptor_socket.h"
#include "client/update_queue.h"
#include "kvsummary/v1/session.grpc.pb.h"
#include "proto/update_queue.h"

namespace kvsummary {
namespace {

const std::string kId = "0123456789abcdef";

// Sessions that live until the client goes, or until they are told to end.
class Sessions : public v1::SessionService::Service {
 public:
  grpc::Status Open(grpc::ServerContext* context, const v1::OpenRequest* request,
                    grpc::ServerWriter<v1::OpenResponse>* writer) override {
    if (request->name() == "refused") return Refusal();
    v1::OpenResponse opened;
    opened.mutable_opened()->set_session_id(kId);
    opened.mutable_opened()->set_descriptor_socket(descriptor_socket);
    writer->Write(opened);
    std::unique_lock lock(mutex);
    ++open;
    for (;;) {
      for (const v1::OpenResponse& event : events) writer->Write(event);
      events.clear();
      if (ending || context->IsCancelled()) break;
      changed.wait_for(lock, milliseconds(5));
    }
    --open;
    changed.notify_all();
    return grpc::Status::OK;
  }

  void Tell(const v1::OpenResponse& event, bool and_end) {
    const std::lock_guard lock(mutex);
    events.push_back(event);
    ending = and_end;
    changed.notify_all();
  }

  std::string descriptor_socket;
  std::mutex mutex;
  std::condition_variable changed;
  int open = 0;
  std::vector<v1::OpenResponse> events;
  bool ending = false;
};

class Buffers : public v1::CacheService::Service {
 public:
  grpc::Status CreateCache(grpc::ServerContext*, const v1::CreateCacheRequest* request,
                           v1::CreateCacheResponse* response) override {
    created = *request;
    response->mutable_info()->mutable_cache()->set_name(request->name());
    response->mutable_info()->mutable_cache()->set_generation(1);
    return grpc::Status::OK;
  }
  grpc::Status AttachCache(grpc::ServerContext*, const v1::AttachCacheRequest* request,
                           v1::AttachCacheResponse* response) override {
    EXPECT_EQ(request->session_id(), kId);
    response->mutable_info()->mutable_cache()->set_name(request->name());
    response->mutable_info()->mutable_cache()->set_generation(2);
    return grpc::Status::OK;
  }
  grpc::Status ExportMemory(grpc::ServerContext*, const v1::ExportMemoryRequest* request,
                            v1::ExportMemoryResponse* response) override {
    EXPECT_EQ(request->session_id(), kId);
    EXPECT_EQ(request->cache().generation(), 7);
    v1::MemoryHandle* memory = response->mutable_memory();
    memory->set_kind(v1::MEMORY_KIND_CUDA_IPC);
    memory->set_handle(std::string(64, 'h'));
    memory->set_size_bytes(1000);
    memory->set_offset_bytes(512);
    memory->set_device_uuid("GPU-x");
    memory->set_pid_namespace(3);
    memory->set_generation(7);
    return grpc::Status::OK;
  }
  grpc::Status ReleaseMemory(grpc::ServerContext*, const v1::ReleaseMemoryRequest* request,
                             v1::ReleaseMemoryResponse*) override {
    return request->session_id() == kId ? grpc::Status::OK : Refusal();
  }
  grpc::Status RegisterBuffer(grpc::ServerContext*, const v1::RegisterBufferRequest* request,
                              v1::RegisterBufferResponse* response) override {
    registered = *request;
    response->set_buffer_id(17);
    response->set_ticket(std::string(kTicketBytes, 't'));
    return grpc::Status::OK;
  }
  grpc::Status UnregisterBuffer(grpc::ServerContext*, const v1::UnregisterBufferRequest* request,
                                v1::UnregisterBufferResponse*) override {
    unregistered.push_back(request->buffer_id());
    return grpc::Status::OK;
  }

  v1::CreateCacheRequest created;
  v1::RegisterBufferRequest registered;
  std::vector<std::uint64_t> unregistered;
};

class ClientSessionTest : public testing::Test {
 protected:
  void SetUp() override {
    char folder[] = "/tmp/kvs-XXXXXX";
    ASSERT_NE(mkdtemp(folder), nullptr);
    folder_ = folder;
    sessions_.descriptor_socket = descriptors_.path();
    grpc::ServerBuilder builder;
    builder.AddListeningPort("unix:" + folder_ + "/s", grpc::InsecureServerCredentials());
    builder.RegisterService(&sessions_);
    builder.RegisterService(&buffers_);
    builder.RegisterService(&updates_);
    server_ = builder.BuildAndStart();
    ASSERT_NE(server_, nullptr);
    auto client = Client::Connect("unix:" + folder_ + "/s");
    ASSERT_TRUE(client.ok()) << client.status();
    client_ = *std::move(client);
    auto session = client_->OpenSession("engine-0");
    ASSERT_TRUE(session.ok()) << session.status();
    session_ = *std::move(session);
  }
  void TearDown() override {
    session_.reset();
    client_.reset();
    server_->Shutdown();
    std::filesystem::remove_all(folder_);
  }

  std::string folder_;
  // The daemon's end: what came with the ticket is kept, and refused when `refuse` is set.
  bool refuse_ = false;
  OwnedDescriptor queue_memory_ = MakeMemfd(kUpdateQueueBytes);
  OwnedDescriptor queue_wake_{eventfd(0, EFD_CLOEXEC)};
  OwnedDescriptor received_;
  FakeDescriptorSocket descriptors_{[this](const DescriptorRequest& request, OwnedDescriptor descriptor) {
    EXPECT_EQ(request.ticket[0], 't');
    received_ = std::move(descriptor);
    FakeAnswer answer;
    if (request.ticket[1] == 'm') answer.descriptors = {queue_memory_.get()};
    if (request.ticket[1] == 'm') answer.reply.size_bytes = kUpdateQueueBytes;
    if (request.ticket[1] == 'w') answer.descriptors = {queue_wake_.get()};
    if (refuse_) {
      answer.reply.code = 3;
      std::strcpy(answer.reply.reason, "MEMFD_NOT_SEALED");
    }
    return answer;
  }};
  Daemon daemon_;
  Updates updates_{daemon_};
  Sessions sessions_;
  Buffers buffers_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<Client> client_;
  std::unique_ptr<ClientSession> session_;
  const Cache cache_{.name = "c", .generation = 7, .device = "host", .geometry = {}};
};

TEST_F(ClientSessionTest, LivesUntilItIsClosed) {
  EXPECT_EQ(session_->descriptor_socket(), descriptors_.path());
  EXPECT_FALSE(session_->lost());
  session_.reset();
  std::unique_lock lock(sessions_.mutex);
  EXPECT_TRUE(
      sessions_.changed.wait_for(lock, std::chrono::seconds(10), [this] { return sessions_.open == 0; }));
}

TEST_F(ClientSessionTest, ARefusedOpenSaysWhy) {
  EXPECT_EQ(ReasonOf(client_->OpenSession("refused").status()), "SLOT_OUT_OF_RANGE");
}

TEST_F(ClientSessionTest, ToldOfEventsAndItsEnd) {
  v1::OpenResponse lost;
  lost.mutable_cache_lost()->mutable_cache()->set_name("c");
  lost.mutable_cache_lost()->mutable_cache()->set_generation(7);
  sessions_.Tell(lost, false);
  v1::OpenResponse draining;
  draining.mutable_draining();
  sessions_.Tell(draining, true);
  ASSERT_TRUE(session_->WaitUntilLost(std::chrono::seconds(10)));
  EXPECT_TRUE(session_->draining());
  EXPECT_TRUE(session_->IsCacheLost(cache_));
  EXPECT_FALSE(session_->IsCacheLost({.name = "c", .generation = 8, .device = "", .geometry = {}}));
  EXPECT_EQ(session_->end().code(), absl::StatusCode::kAborted);
}

TEST_F(ClientSessionTest, IsLostWithTheDaemon) {
  sessions_.Tell({}, true);
  server_->Shutdown();
  EXPECT_TRUE(session_->WaitUntilLost(std::chrono::seconds(10)));
  EXPECT_FALSE(session_->end().ok());
}

TEST_F(ClientSessionTest, ItsCachesAreItsOwn) {
  const auto cache = session_->CreateCache("c", "host", {.layers = 2}, HandleKind::kMemfd);
  ASSERT_TRUE(cache.ok()) << cache.status();
  EXPECT_EQ(buffers_.created.session_id(), kId);
  EXPECT_EQ(buffers_.created.memory_kind(), v1::MEMORY_KIND_MEMFD);
  EXPECT_EQ(buffers_.created.geometry().layers(), 2);
  EXPECT_EQ(session_->AttachCache("c")->generation, 2);
}

TEST_F(ClientSessionTest, ExportsAHandle) {
  const auto memory = session_->ExportMemory(cache_);
  ASSERT_TRUE(memory.ok()) << memory.status();
  EXPECT_EQ(memory->kind, HandleKind::kCudaIpc);
  EXPECT_EQ(memory->handle, std::string(64, 'h'));
  EXPECT_EQ(memory->size_bytes, 1000);
  EXPECT_EQ(memory->offset_bytes, 512);
  EXPECT_EQ(memory->device_uuid, "GPU-x");
  EXPECT_EQ(memory->pid_namespace, 3);
  EXPECT_EQ(memory->generation, 7);
  EXPECT_TRUE(session_->ReleaseMemory(cache_).ok());
}

TEST_F(ClientSessionTest, ABufferIsASealedMemfdThatTheDaemonGets) {
  const auto buffer = session_->RegisterBuffer(5000);
  ASSERT_TRUE(buffer.ok()) << buffer.status();
  EXPECT_EQ((*buffer)->id(), 17);
  EXPECT_EQ((*buffer)->bytes(), 5000);
  EXPECT_EQ(buffers_.registered.memory().kind(), v1::MEMORY_KIND_MEMFD);
  EXPECT_EQ(buffers_.registered.memory().size_bytes(), 5000);
  struct stat file = {};
  ASSERT_EQ(fstat(received_.get(), &file), 0);
  EXPECT_EQ(file.st_size, 5000);
  EXPECT_EQ(fcntl(received_.get(), F_GET_SEALS) & (F_SEAL_SHRINK | F_SEAL_GROW), F_SEAL_SHRINK | F_SEAL_GROW);
  std::strcpy((*buffer)->data(), "seen");
  char seen[5] = {};
  ASSERT_EQ(pread(received_.get(), seen, 4, 0), 4);
  EXPECT_STREQ(seen, "seen");
  EXPECT_TRUE(session_->UnregisterBuffer((*buffer)->id()).ok());
  EXPECT_EQ(buffers_.unregistered, std::vector<std::uint64_t>{17});
}

TEST_F(ClientSessionTest, ABufferWhoseTicketIsRefusedIsGivenUp) {
  refuse_ = true;
  const auto status = session_->RegisterBuffer(5000).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReasonOf(status), "MEMFD_NOT_SEALED");
  EXPECT_EQ(buffers_.unregistered, std::vector<std::uint64_t>{17});
  EXPECT_EQ(session_->RegisterBuffer(0).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(ClientSessionTest, ACudaBufferTravelsAsItsHandle) {
  const std::vector<std::uint8_t> handle(64, 9);
  EXPECT_EQ(*session_->RegisterCudaBuffer(handle, 256, 4096, "GPU-x"), 17);
  const v1::MemoryHandle& memory = buffers_.registered.memory();
  EXPECT_EQ(memory.kind(), v1::MEMORY_KIND_CUDA_IPC);
  EXPECT_EQ(memory.handle(), std::string(64, '\t'));
  EXPECT_EQ(memory.offset_bytes(), 256);
  EXPECT_EQ(memory.size_bytes(), 4096);
  EXPECT_NE(memory.pid_namespace(), 0);
}

TEST_F(ClientSessionTest, AQueueIsTheDaemonsMemoryAndEndsWithTheSession) {
  const UpdateQueueMemory empty;
  ASSERT_EQ(pwrite(queue_memory_.get(), &empty, sizeof(empty), 0), kUpdateQueueBytes);
  auto queue = session_->OpenQueue();
  ASSERT_TRUE(queue.ok()) << queue.status();
  const auto number = (*queue)->Decode(cache_, {0, 1}, {});
  ASSERT_TRUE(number.ok()) << number.status();
  std::uint64_t submitted = 0;
  ASSERT_EQ(pread(queue_memory_.get(), &submitted, 8, offsetof(UpdateQueueMemory, submitted)), 8);
  EXPECT_EQ(submitted, 1);
  sessions_.Tell({}, true);
  EXPECT_EQ((*queue)->Wait(*number).status().code(), absl::StatusCode::kUnavailable);
  session_.reset();
  EXPECT_EQ((*queue)->Decode(cache_, {0, 1}, {}).status().code(), absl::StatusCode::kUnavailable);
}

TEST_F(ClientSessionTest, AQueueOfAnotherVersionIsRefused) {
  UpdateQueueMemory other;
  other.version = 2;
  ASSERT_EQ(pwrite(queue_memory_.get(), &other, sizeof(other), 0), kUpdateQueueBytes);
  EXPECT_EQ(session_->OpenQueue().status().code(), absl::StatusCode::kInternal);
}

TEST_F(ClientSessionTest, AStreamTakesReferencesToo) {
  const SharedUpdate update{.rows = {1, 2, 3, 4, 5}, .slots = {1, 8, 2}, .ready = {1, 16, 3}};
  const Arrays arrays(1, 2);
  auto stream = client_->OpenUpdateStream();
  ASSERT_TRUE(stream->Decode(cache_, {0, 1}, arrays.Decode()).ok());
  ASSERT_TRUE(stream->Decode(*session_, cache_, {1, 2}, update).ok());
  ASSERT_TRUE(stream->Verify(*session_, cache_, {1, 2}, update).ok());
  ASSERT_TRUE(stream->Prefill(*session_, cache_, {1, 2}, update).ok());
  ASSERT_TRUE(stream->Decode(cache_, {0, 1}, arrays.Decode()).ok());
  const auto result = stream->Flush();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->regions_closed, 5);
  ASSERT_EQ(daemon_.updates.size(), 5);
  const auto& decode = daemon_.updates[1].decode();
  EXPECT_EQ(decode.slots_size(), 0);
  EXPECT_EQ(decode.layers().count(), 2);
  EXPECT_EQ(decode.rows().reference().key_offset_bytes(), 2);
  EXPECT_EQ(decode.shared().session_id(), kId);
  EXPECT_EQ(decode.shared().arrays().slots().offset_bytes(), 8);
  EXPECT_EQ(decode.shared().ready().value(), 3);
  EXPECT_TRUE(daemon_.updates[2].has_verify());
  EXPECT_TRUE(daemon_.updates[3].has_prefill());
  for (const int inlined : {0, 4}) {
    EXPECT_EQ(daemon_.updates[inlined].decode().slots_size(), 2);
    EXPECT_FALSE(daemon_.updates[inlined].decode().has_shared());
  }
}

TEST_F(ClientSessionTest, UpdatesBringReferencesOnly) {
  const SharedUpdate update{.rows = {1, 2, 3, 4, 5},
                            .slots = {1, 8, 2},
                            .query_start_loc = {1, 24, 3},
                            .seq_lens = {1, 32, 2},
                            .ring_bases = {1, 40, 2},
                            .done = {1, 48, 6}};
  EXPECT_TRUE(session_->Verify(cache_, {1, 2}, update).ok());
  ASSERT_EQ(daemon_.updates.size(), 1);
  const auto& verify = daemon_.updates[0].verify();
  EXPECT_EQ(verify.cache().generation(), 7);
  EXPECT_EQ(verify.layers().first(), 1);
  EXPECT_EQ(verify.layers().count(), 2);
  EXPECT_EQ(verify.slots_size(), 0);
  EXPECT_EQ(verify.rows().reference().z_offset_bytes(), 3);
  EXPECT_EQ(verify.rows().reference().layer_stride_bytes(), 5);
  EXPECT_EQ(verify.shared().session_id(), kId);
  EXPECT_EQ(verify.shared().arrays().seq_lens().offset_bytes(), 32);
  EXPECT_FALSE(verify.shared().arrays().has_positions());
  EXPECT_FALSE(verify.shared().has_ready());
  EXPECT_EQ(verify.shared().done().value(), 6);
  EXPECT_TRUE(session_->Decode(cache_, {0, 1}, update).ok());
  EXPECT_TRUE(session_->Prefill(cache_, {0, 1}, update).ok());
  EXPECT_TRUE(daemon_.updates[1].has_decode());
  EXPECT_TRUE(daemon_.updates[2].has_prefill());
}

}  // namespace
}  // namespace kvsummary
