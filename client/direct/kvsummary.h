/* libkvsummary: a cache's memory, updated by the process that maps it (the direct plane).
 *
 * Whoever holds a session of summaryd asks it for a handle to a cache's memory (CacheService.ExportMemory).
 * kvs_map makes that memory part of this process, and kvs_decode, kvs_verify and kvs_prefill run the daemon's
 * own kernels on it in the caller's stream, without a call to the daemon. Every byte is the daemon's and is
 * read by others as it is written. The library has no gRPC, protobuf or Abseil inside, and shares a process
 * with any other user of CUDA: it works in the device's primary context.
 *
 * The same calls serve host memory: pointers are then host pointers, the stream is ignored, and an update is
 * complete on return.
 *
 * Functions return a kvs_code; kvs_last_error says more. They may be called from any thread; a kvs_cache must
 * not be unmapped while another thread uses it. Nothing throws. Not usable in a child after fork(), which
 * does not inherit the memory of a mapped cache.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KVS_API __attribute__((visibility("default")))

/* The numbers of gRPC's codes; refusals of the daemon's descriptor socket come with the daemon's own code. */
enum kvs_code {
  KVS_OK = 0,
  KVS_INVALID_ARGUMENT = 3,    /* an argument that cannot be; nothing was launched */
  KVS_DEADLINE_EXCEEDED = 4,   /* the daemon did not answer within ten seconds */
  KVS_NOT_FOUND = 5,           /* the daemon does not know the ticket, or knew it once */
  KVS_RESOURCE_EXHAUSTED = 8,  /* no memory */
  KVS_FAILED_PRECONDITION = 9, /* a handle that cannot be opened here; kvs_last_reason says why */
  KVS_UNIMPLEMENTED = 12,      /* CUDA memory, in a library built without CUDA */
  KVS_INTERNAL = 13,           /* CUDA or the daemon failed */
  KVS_UNAVAILABLE = 14         /* nobody answers at the descriptor socket */
};

/* The numbers of kvsummary.v1.MemoryKind. */
enum kvs_memory_kind { KVS_MEMFD = 1, KVS_CUDA_VMM = 2, KVS_CUDA_IPC = 3 };

/* As the daemon answers it (kvsummary.v1.CacheGeometry), defaults filled in. */
typedef struct kvs_geometry {
  int32_t layers;
  int64_t blocks;
  int32_t block_size;   /* tokens */
  int64_t block_stride; /* bytes */
  int64_t ring_blocks;
  int32_t capacity;       /* ring rows in use, of a request and layer */
  int32_t rows_per_layer; /* ring rows reserved, of a request and layer */
  int32_t k;
} kvs_geometry;

/* A handle to a cache's memory, field by field kvsummary.v1.MemoryHandle, and the cache's geometry. */
typedef struct kvs_map_args {
  const char* socket_path; /* SessionOpened.descriptor_socket; not used for CUDA_IPC, may then be null */
  int32_t kind;            /* enum kvs_memory_kind */
  const void* handle;      /* a ticket of 32 bytes; CUDA_IPC: the handle, 64 bytes */
  size_t handle_bytes;
  int64_t size_bytes;
  int64_t offset_bytes;    /* CUDA_IPC: of the memory within the allocation; else 0 */
  const char* device_uuid; /* "GPU-..."; null or empty for host memory */
  uint64_t pid_namespace;
  uint64_t generation;
  kvs_geometry geometry;
} kvs_map_args;

/* A cache that this process has mapped. */
typedef struct kvs_cache kvs_cache;

/* Maps a cache's memory. A ticket is redeemed with a pidfd of this process, so the daemon knows when the
 * mapping is gone for certain. On CUDA the kernels are loaded and run once, on nothing, so that the first
 * update may already be captured in a graph; the calling thread's device is as before on return.
 *
 * Handles that are open are remembered: a map with equal handle, device and generation answers the mapping
 * that is there, in less than a microsecond, and does not redeem the ticket again. Each needs its own
 * kvs_unmap. On failure *cache is null. */
KVS_API int kvs_map(const kvs_map_args* args, kvs_cache** cache);

/* Ends the use of `cache`, and unmaps the memory with its last use. Every launch on it must have finished:
 * CUDA does not wait. Tell the daemon afterwards (CacheService.ReleaseMemory, which a session that was lost
 * may still call), as after a kvs_map that failed once the ticket was redeemed. Null is allowed. */
KVS_API int kvs_unmap(kvs_cache* cache);

/* Rows: bf16 [layers][rows][256] of key and of z. Strides count elements; key and z may be column slices of
 * one wide tensor. On CUDA pointers are device pointers, aligned to 16 bytes, and strides multiples of 8. */
typedef struct kvs_rows {
  const void* key;
  const void* z;
  int64_t key_stride; /* from token to token */
  int64_t z_stride;
  int64_t key_layer_stride; /* from layer to layer */
  int64_t z_layer_stride;
} kvs_rows;

/* What every update has. On CUDA all pointers are read when the stream gets there and must stay valid until
 * it has passed. */
typedef struct kvs_step {
  int32_t first_layer;
  int32_t layers; /* at least 1 */
  int32_t rows;   /* tokens; 0 is no work */
  kvs_rows in;
  const int64_t* slots;      /* [rows] block * block_size + position % block_size; negative: padding */
  const int64_t* ring_bases; /* [rows] ring_block * layers of the cache * rows_per_layer; negative: padding */
  void* stream;              /* cudaStream_t or CUstream, of the mapping's device */
  /* Where the kernel can write: rows with bad indices are skipped and added here, once a layer. Or null. */
  uint64_t* skipped;
} kvs_step;

/* One row a request. The arrays are as in kvsummary/v1/update.proto; what the daemon would refuse and no
 * kernel can see (a slot twice, a ring base of two requests) is the caller's to avoid. */
KVS_API int kvs_decode(kvs_cache* cache, const kvs_step* step, const int64_t* positions /* [rows] */);

/* A token and its drafts for each request: row r of request i has position
 * seq_lens[i] - (query_start_loc[i + 1] - r). The cache's capacity must be at least 8. */
KVS_API int kvs_verify(kvs_cache* cache, const kvs_step* step, int32_t requests,
                       const int32_t* query_start_loc /* [requests + 1] */,
                       const int32_t* seq_lens /* [requests] */);

/* Chunks of any length of several requests. */
KVS_API int kvs_prefill(kvs_cache* cache, const kvs_step* step, const int64_t* positions /* [rows] */,
                        int32_t requests, const int32_t* query_start_loc /* [requests + 1] */);

/* Start of the mapped memory, of this process or of the device; its layout follows from the geometry. For
 * reading what others have written, after whatever order with the writer the caller keeps. */
KVS_API void* kvs_data(const kvs_cache* cache);

/* Text of this thread's last failed call, and its reason as in kvsummary/v1/errors.proto; empty: none.
 * Valid until the thread's next failure. */
KVS_API const char* kvs_last_error(void);
KVS_API const char* kvs_last_reason(void);

/* "MAJOR.MINOR.PATCH" of this library. */
KVS_API const char* kvs_version(void);

#ifdef __cplusplus
}
#endif
