"""The direct plane in a PyTorch process, through libkvsummary.so and ctypes.

    torch_check.py LIBKVSUMMARY DAEMON_CHECK SUMMARYCTL        (the daemon: $SUMMARYD_ADDRESS)

The session is held by DAEMON_CHECK, another process; this one has neither gRPC nor protobuf. A prefill runs
eagerly, decode and verify steps in a captured CUDA graph, all on torch tensors and on torch's current stream. The
cache's bytes, as SUMMARYCTL reads them from the daemon and as torch sees them, must be those of the same steps by
the same library on host memory. The last line is `N passed, N failed`.
"""

import ctypes
import json
import subprocess
import sys

import torch

REQUESTS, PROMPT, STEPS, DRAFTS = 60, 29, 24, 3
CHANNELS = 256

i32, i64, u64, ptr = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64, ctypes.c_void_p


class Geometry(ctypes.Structure):
    _fields_ = [("layers", i32), ("blocks", i64), ("block_size", i32), ("block_stride", i64), ("ring_blocks", i64),
                ("capacity", i32), ("rows_per_layer", i32), ("k", i32)]


class MapArgs(ctypes.Structure):
    _fields_ = [("socket_path", ctypes.c_char_p), ("kind", i32), ("handle", ptr), ("handle_bytes", ctypes.c_size_t),
                ("size_bytes", i64), ("offset_bytes", i64), ("device_uuid", ctypes.c_char_p), ("pid_namespace", u64),
                ("generation", u64), ("geometry", Geometry)]


class Rows(ctypes.Structure):
    _fields_ = [("key", ptr), ("z", ptr), ("key_stride", i64), ("z_stride", i64), ("key_layer_stride", i64),
                ("z_layer_stride", i64)]


class Step(ctypes.Structure):
    _fields_ = [("first_layer", i32), ("layers", i32), ("rows", i32), ("in_", Rows), ("slots", ptr),
                ("ring_bases", ptr), ("stream", ptr), ("skipped", ptr)]


class Cache:
    """A mapped cache, on tensors of one device."""

    def __init__(self, lib, made, device):
        self.lib, self.device, self.made = lib, device, made
        self.handle = bytes.fromhex(made["handle"])
        buffer = ctypes.create_string_buffer(self.handle, len(self.handle))
        args = MapArgs(made["socket"].encode(), made["kind"], ctypes.cast(buffer, ptr), len(self.handle),
                       made["size_bytes"], made["offset_bytes"], made["device_uuid"].encode(),
                       made["pid_namespace"], made["generation"],
                       Geometry(*(made[f] for f, _ in Geometry._fields_)))
        self.cache = ptr()
        self.check("kvs_map", lib.kvs_map(ctypes.byref(args), ctypes.byref(self.cache)))
        self.skipped = torch.zeros(1, dtype=torch.int64, device=device)

    def check(self, call, code):
        if code != 0:
            raise RuntimeError("%s on %s: %d %s %s" % (call, self.device, code, self.lib.kvs_last_reason().decode(),
                                                       self.lib.kvs_last_error().decode()))

    def step(self, rows, slots, bases):
        """rows: [layers][rows][512] bf16, key then z."""
        layers, count, _ = rows.shape
        stream = torch.cuda.current_stream().cuda_stream if self.device != "cpu" else None
        key = rows.data_ptr()
        return Step(0, layers, count,
                    Rows(key, key + 2 * CHANNELS, rows.stride(1), rows.stride(1), rows.stride(0), rows.stride(0)),
                    slots.data_ptr(), bases.data_ptr(), stream, self.skipped.data_ptr())

    def decode(self, rows, slots, positions, bases):
        step = self.step(rows, slots, bases)
        self.check("kvs_decode", self.lib.kvs_decode(self.cache, ctypes.byref(step), ptr(positions.data_ptr())))

    def verify(self, rows, slots, starts, seq_lens, bases):
        step = self.step(rows, slots, bases)
        self.check("kvs_verify", self.lib.kvs_verify(self.cache, ctypes.byref(step), i32(len(seq_lens)),
                                                     ptr(starts.data_ptr()), ptr(seq_lens.data_ptr())))

    def prefill(self, rows, slots, positions, starts, bases):
        step = self.step(rows, slots, bases)
        self.check("kvs_prefill", self.lib.kvs_prefill(self.cache, ctypes.byref(step), ptr(positions.data_ptr()),
                                                       i32(len(starts) - 1), ptr(starts.data_ptr())))

    def bytes(self):
        """The mapped memory as a tensor, without a copy."""
        self.lib.kvs_data.restype = ptr
        address = self.lib.kvs_data(self.cache)
        size = self.made["size_bytes"]
        if self.device == "cpu":
            return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)

        class Interface:
            __cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}

        return torch.as_tensor(Interface(), device=self.device)

    def unmap(self):
        self.check("kvs_unmap", self.lib.kvs_unmap(self.cache))


class Traffic:
    """The arrays and rows of all steps, on the CPU."""

    def __init__(self, made):
        self.layers, self.block = made["layers"], made["block_size"]
        self.requests = torch.arange(1, REQUESTS + 1, dtype=torch.int64)
        self.bases = self.requests * (made["layers"] * made["rows_per_layer"])
        self.generator = torch.Generator().manual_seed(5)

    def rows(self, count):
        return torch.randn(self.layers, count, 2 * CHANNELS, generator=self.generator).to(torch.bfloat16)

    def slots(self, requests, positions):
        return requests * self.block + positions

    def prefill(self):
        positions = torch.arange(PROMPT, dtype=torch.int64).repeat(REQUESTS)
        requests = self.requests.repeat_interleave(PROMPT)
        starts = torch.arange(0, REQUESTS * PROMPT + 1, PROMPT, dtype=torch.int32)
        return (self.rows(REQUESTS * PROMPT), self.slots(requests, positions), positions, starts,
                self.bases.repeat_interleave(PROMPT))

    def decode(self, i):
        positions = torch.full((REQUESTS,), PROMPT + i, dtype=torch.int64)
        return self.rows(REQUESTS), self.slots(self.requests, positions), positions, self.bases

    def verify(self):
        tokens = DRAFTS + 1
        first = PROMPT + STEPS
        positions = (first + torch.arange(tokens, dtype=torch.int64)).repeat(REQUESTS)
        requests = self.requests.repeat_interleave(tokens)
        starts = torch.arange(0, REQUESTS * tokens + 1, tokens, dtype=torch.int32)
        seq_lens = torch.full((REQUESTS,), first + tokens, dtype=torch.int32)
        return (self.rows(REQUESTS * tokens), self.slots(requests, positions), starts, seq_lens,
                self.bases.repeat_interleave(tokens))


def run_on_host(cache, steps):
    prefill, decodes, verify = steps
    cache.prefill(*prefill)
    for step in decodes:
        cache.decode(*step)
    cache.verify(*verify)


def run_captured(cache, steps):
    """Decode steps by one graph, replayed on changed inputs; the verify step by another."""
    prefill, decodes, verify = steps
    cache.prefill(*(t.cuda() for t in prefill))
    inputs = [torch.empty_like(t, device="cuda") for t in decodes[0]]
    staged = [torch.empty_like(t, device="cuda") for t in decodes[0]]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for to, source in zip(inputs, staged):  # torch's own kernels, before ours in the same stream
            to.copy_(source)
        cache.decode(*inputs)
    for step in decodes:
        for to, source in zip(staged, step):
            to.copy_(source)
        graph.replay()
    drafts = [t.cuda() for t in verify]
    torch.cuda.synchronize()
    last = torch.cuda.CUDAGraph()
    with torch.cuda.graph(last):
        cache.verify(*drafts)
    last.replay()
    torch.cuda.synchronize()


def dump(summaryctl, name):
    return subprocess.run([summaryctl, "dump", "--name=" + name, "--format=raw"], check=True,
                          stdout=subprocess.PIPE).stdout


def pages_and_tails(made, memory):
    """What `summaryctl dump` prints, from a cache's memory: pages, then the rings' rows in use."""
    pages_bytes = made["blocks"] * made["block_stride"]
    page = made["layers"] * made["block_size"] // 8 * CHANNELS
    pages = memory[:pages_bytes].view(made["blocks"], made["block_stride"])[:, :page]
    ring_offset = (pages_bytes + 4095) // 4096 * 4096
    rows = made["ring_blocks"] * made["layers"] * made["rows_per_layer"]
    rings = memory[ring_offset:ring_offset + rows * 1024]
    tails = rings.view(-1, made["rows_per_layer"], 1024)[:, :made["capacity"]]
    return pages.contiguous().cpu().numpy().tobytes() + tails.contiguous().cpu().numpy().tobytes()


def main():
    library, daemon_check, summaryctl = sys.argv[1:]
    results = []

    def check(name, good):
        results.append(good)
        print("%s %s" % ("PASS" if good else "FAIL", name), flush=True)

    print("torch %s, CUDA %s, %s" % (torch.__version__, torch.version.cuda, torch.cuda.get_device_name(0)), flush=True)
    torch.ones(1, device="cuda").add_(1)  # torch uses CUDA first: the library joins its context
    holder = subprocess.Popen([daemon_check, "hold", "torch-cuda=cuda:0", "torch-host=host"], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, text=True)
    lines = [holder.stdout.readline() for _ in range(2)]
    try:
        on_cuda, on_host = (json.loads(line) for line in lines)
    except ValueError:
        sys.exit("the session's holder said: %s" % "".join(lines))
    lib = ctypes.CDLL(library)
    lib.kvs_last_error.restype = lib.kvs_last_reason.restype = ctypes.c_char_p
    traffic = Traffic(on_cuda)
    steps = traffic.prefill(), [traffic.decode(i) for i in range(STEPS)], traffic.verify()
    device, host = Cache(lib, on_cuda, "cuda"), Cache(lib, on_host, "cpu")
    run_on_host(host, steps)
    run_captured(device, steps)
    check("no row was skipped", int(device.skipped.item()) == 0 and int(host.skipped.item()) == 0)
    seen = pages_and_tails(on_cuda, device.bytes())
    check("something was written", any(seen[on_cuda["layers"] * 8 * CHANNELS:]))
    check("torch sees the bytes of the same steps on the host", seen == pages_and_tails(on_host, host.bytes()))
    check("the daemon reads the same bytes, by another process", dump(summaryctl, "torch-cuda") == seen)
    check("and those of the host's cache", dump(summaryctl, "torch-host") == seen)
    torch.cuda.synchronize()
    device.unmap()
    host.unmap()
    check("torch goes on after the library has unmapped", float(torch.ones(4, device="cuda").sum()) == 4)
    holder.stdin.close()
    check("the session's holder ends well", holder.wait(timeout=30) == 0)
    print("%d passed, %d failed" % (sum(results), len(results) - sum(results)))
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
