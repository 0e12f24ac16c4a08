/* libkvsummary.so from a C program: it links, maps a cache from a descriptor socket, updates it. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "client/direct/kvsummary.h"

#define CHECK(condition)                                                            \
  do {                                                                              \
    if (!(condition)) {                                                             \
      fprintf(stderr, "line %d: %s: %s\n", __LINE__, #condition, kvs_last_error()); \
      exit(1);                                                                      \
    }                                                                               \
  } while (0)

enum { kLayers = 1, kBlocks = 2, kRingBlocks = 2, kRows = 8, kPages = 4096, kBytes = kPages + 2 * 8 * 1024 };

static int listener, memfd;

/* Answers one request with the memfd. */
static void* Serve(void* unused) {
  (void)unused;
  const int connection = accept(listener, NULL, NULL);
  close(listener);
  char request[40];
  CHECK(recv(connection, request, sizeof(request), 0) == sizeof(request));
  struct {
    uint32_t magic, code;
    uint64_t size_bytes;
    char reason[64];
  } reply = {0x6b767331, 0, kBytes, ""};
  union {
    struct cmsghdr header;
    char room[CMSG_SPACE(sizeof(int))];
  } control;
  memset(&control, 0, sizeof(control));
  struct iovec part = {&reply, sizeof(reply)};
  struct msghdr message = {
      .msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control)};
  control.header.cmsg_level = SOL_SOCKET;
  control.header.cmsg_type = SCM_RIGHTS;
  control.header.cmsg_len = CMSG_LEN(sizeof(int));
  memcpy(CMSG_DATA(&control.header), &memfd, sizeof(int));
  CHECK(sendmsg(connection, &message, 0) == sizeof(reply));
  close(connection);
  return NULL;
}

int main(void) {
  char folder[] = "/tmp/kvs-XXXXXX";
  CHECK(mkdtemp(folder) != NULL);
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  snprintf(address.sun_path, sizeof(address.sun_path), "%s/fd", folder);
  listener = socket(AF_UNIX, SOCK_SEQPACKET, 0);
  CHECK(bind(listener, (struct sockaddr*)&address, sizeof(address)) == 0 && listen(listener, 1) == 0);
  memfd = memfd_create("kvs-test", 0);
  CHECK(ftruncate(memfd, kBytes) == 0);
  pthread_t server;
  CHECK(pthread_create(&server, NULL, Serve, NULL) == 0);

  const unsigned char ticket[32] = {1};
  kvs_map_args args = {.socket_path = address.sun_path,
                       .kind = KVS_MEMFD,
                       .handle = ticket,
                       .handle_bytes = sizeof(ticket),
                       .size_bytes = kBytes,
                       .generation = 1,
                       .geometry = {.layers = kLayers,
                                    .blocks = kBlocks,
                                    .block_size = 8,
                                    .block_stride = 256,
                                    .ring_blocks = kRingBlocks,
                                    .capacity = 8,
                                    .rows_per_layer = 8,
                                    .k = 1}};
  kvs_cache* cache = NULL;
  CHECK(kvs_map(&args, &cache) == KVS_OK && cache != NULL);
  pthread_join(server, NULL);

  /* Eight rows of key 1.0 and z 0 close a region whose mean is 1.0 in every channel: 0x38 as e4m3. */
  static uint16_t rows[kRows][512];
  int64_t slots[kRows], positions[kRows], bases[kRows];
  for (int i = 0; i < kRows; ++i) {
    for (int c = 0; c < 256; ++c) rows[i][c] = 0x3f80;
    slots[i] = 8 + i;
    positions[i] = i;
    bases[i] = 8;
  }
  const int32_t starts[] = {0, kRows};
  const kvs_step step = {.layers = kLayers,
                         .rows = kRows,
                         .in = {.key = rows, .z = &rows[0][256], .key_stride = 512, .z_stride = 512},
                         .slots = slots,
                         .ring_bases = bases};
  CHECK(kvs_prefill(cache, &step, positions, 1, starts) == KVS_OK);
  const unsigned char* bytes = mmap(NULL, kBytes, PROT_READ, MAP_SHARED, memfd, 0);
  CHECK(bytes != MAP_FAILED);
  for (int i = 0; i < 256; ++i) CHECK(bytes[256 + i] == 0x38);
  CHECK(memcmp(bytes, kvs_data(cache), kBytes) == 0);

  kvs_step bad = step;
  bad.first_layer = 1;
  CHECK(kvs_decode(cache, &bad, positions) == KVS_INVALID_ARGUMENT);
  CHECK(strcmp(kvs_last_reason(), "LAYERS_OUT_OF_RANGE") == 0 && kvs_last_error()[0] != '\0');
  CHECK(kvs_unmap(cache) == KVS_OK);
  CHECK(kvs_map(&args, &cache) != KVS_OK && cache == NULL); /* unmapped, and nobody answers any more */
  CHECK(strchr(kvs_version(), '.') != NULL);

  unlink(address.sun_path);
  rmdir(folder);
  puts("passed");
  return 0;
}
