#!/usr/bin/env python3
"""Times the CUDA update kernels beside the engine's own Triton kernels, on the same tensors.

  bench_kernels.py --engine summary_update.py [--json FILE] libkvsummary_bench.so ...

Needs torch, triton and a CUDA device. summary_update.py is vllm/models/step5/nvidia/ops/summary_update.py
of the vLLM 0.33 wheel; its import of vLLM's triton shim is answered here. Several libraries stand side by
side; the first is the one that ratios are of.

Every figure is the median over replays of a CUDA graph that holds a run of launches, divided by their
number. "cold": the launches of a graph touch different slices of more than 200 MB, and the L2 cache is
filled with other bytes before each replay. "warm": all launches use one slice. Bytes are counted once each: rows and ring
rows read, ring rows and summaries written, indices. After each case pages and rings are compared.
"""

import argparse
import ctypes as c
import importlib.util
import json
import statistics
import sys
import types

import torch
import triton
import triton.language as tl

BLOCK_SIZE = 64
CAPACITY = 10  # k = 3
LAYERS = 23
COLD_BYTES = 260 << 20


class CacheView(c.Structure):
    _fields_ = [("summaries", c.c_void_p), ("block_stride", c.c_int64), ("layer_stride", c.c_int64),
                ("blocks", c.c_int64), ("block_size", c.c_int32), ("layers", c.c_int32), ("ring", c.c_void_p),
                ("ring_layer_stride", c.c_int64), ("ring_blocks", c.c_int64), ("rows_per_block", c.c_int64),
                ("capacity", c.c_int32)]


class RowsView(c.Structure):
    _fields_ = [("key", c.c_void_p), ("z", c.c_void_p), ("key_stride", c.c_int64), ("z_stride", c.c_int64),
                ("key_layer_stride", c.c_int64), ("z_layer_stride", c.c_int64)]


class DecodeStep(c.Structure):
    _fields_ = [("rows", c.c_int32), ("rows_in", RowsView), ("slots", c.c_void_p), ("positions", c.c_void_p),
                ("ring_bases", c.c_void_p)]


class VerifyStep(c.Structure):
    _fields_ = [("rows", c.c_int32), ("requests", c.c_int32), ("rows_in", RowsView), ("slots", c.c_void_p),
                ("query_start_loc", c.c_void_p), ("seq_lens", c.c_void_p), ("ring_bases", c.c_void_p)]


class PrefillStep(c.Structure):
    _fields_ = [("rows", c.c_int32), ("requests", c.c_int32), ("rows_in", RowsView), ("slots", c.c_void_p),
                ("positions", c.c_void_p), ("query_start_loc", c.c_void_p), ("ring_bases", c.c_void_p)]


def load_engine(path):
    shim = types.ModuleType("vllm.triton_utils")
    shim.tl, shim.triton = tl, triton
    sys.modules["vllm"] = types.ModuleType("vllm")
    sys.modules["vllm.triton_utils"] = shim
    spec = importlib.util.spec_from_file_location("summary_update", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_ours(path):
    lib = c.CDLL(path)
    sizes = (c.c_int * 5)()
    lib.kvs_sizes(sizes)
    assert list(sizes) == [c.sizeof(t) for t in (CacheView, RowsView, DecodeStep, VerifyStep, PrefillStep)]
    for f in (lib.kvs_decode, lib.kvs_verify, lib.kvs_prefill):
        f.argtypes = [c.c_void_p, c.c_void_p, c.c_void_p]
    return lib


class Slices:
    """`count` independent steps of one shape over common pages and rings, in one layer or several.

    A slice has its own rows, indices, blocks and ring blocks. requests, q: as many rows each."""

    def __init__(self, kind, requests, q, count, positions, layers=1):
        device, g = "cuda", torch.Generator("cuda").manual_seed(1)
        self.kind, self.requests, self.q, self.count, self.layers = kind, requests, q, count, layers
        rows = self.rows = requests * q
        self.key_z = torch.randn((count, layers, rows, 512), device=device, generator=g, dtype=torch.bfloat16)
        self.key_z[..., 256:] *= 4
        # First positions of every request: its blocks follow one another, scattered over the cache.
        first = positions((count, requests), g)
        self.positions = (first[:, :, None] + torch.arange(q, device=device)).reshape(count, rows)
        blocks_each = (q + BLOCK_SIZE - 1) // BLOCK_SIZE + 1
        n = count * requests
        ids = 1 + torch.randperm(n * blocks_each, device=device, generator=g).reshape(count, requests, blocks_each)
        index = self.positions.reshape(count, requests, q) // BLOCK_SIZE - (first // BLOCK_SIZE)[:, :, None]
        self.slots = (ids.gather(2, index) * BLOCK_SIZE).reshape(count, rows) + self.positions % BLOCK_SIZE
        rings = 1 + torch.randperm(n, device=device, generator=g).reshape(count, requests)
        self.bases = (rings * (layers * CAPACITY))[:, :, None].expand(count, requests, q).reshape(count, rows).contiguous()
        self.qsl = (torch.arange(requests + 1, device=device) * q).to(torch.int32)
        self.seq_lens = (first + q).to(torch.int32)
        self.owners = torch.arange(requests, device=device).repeat_interleave(q)
        last = first[:, :, None] + q - CAPACITY
        p = self.positions.reshape(count, requests, q)
        kept = self.bases.reshape(count, requests, q) + p % CAPACITY
        self.ring_slots = torch.where(p >= last, kept, -1).reshape(count, rows)
        self.blocks, self.ring_blocks = 1 + n * blocks_each, 1 + n
        self.mean = torch.randint(0, 256, (self.blocks, layers, BLOCK_SIZE // 8, 256), device=device, generator=g,
                                  dtype=torch.uint8)
        self.ring = torch.randn((self.ring_blocks, layers, CAPACITY, 512), device=device, generator=g,
                                dtype=torch.bfloat16)
        closing = int((self.positions % 8 == 7).sum()) * layers // count
        stored = rows * layers if kind == "verify" else min(rows, requests * CAPACITY) * layers
        if kind == "decode":
            stored -= closing
        lead = first % 8  # rows of the first region that an earlier step has stored
        from_ring = int(torch.where(lead + q >= 8, lead, 0).sum()) * layers // count
        self.bytes = 1024 * (rows * layers + from_ring + stored) + 256 * closing + 24 * rows

    def state(self):
        return self.mean.clone(), self.ring.clone()

    def engine(self, module, mean, ring, i, groups=None):
        for layer in range(self.layers):
            key, z = self.key_z[i, layer, :, :256], self.key_z[i, layer, :, 256:]
            m, r = mean[:, layer], ring.reshape(-1, 512)[layer * CAPACITY:]
            slots, bases = self.slots[i], self.bases[i]
            if self.kind == "decode":
                module.update_decode(key, z, slots, self.positions[i], bases, m, r, CAPACITY)
            elif self.kind == "verify":
                module.update_verify(key[:, None], z[:, None], slots, self.qsl, self.seq_lens[i], bases, m, r, CAPACITY)
            else:
                module.update_prefill(key[:, None], z[:, None], groups[i], self.positions[i], bases,
                                      self.ring_slots[i], m, r, CAPACITY)

    def groups(self, module, i):
        return module.build_prefill_groups(self.slots[i], self.positions[i], self.owners, self.qsl)

    def ours(self, lib, mean, ring, i):
        page = BLOCK_SIZE // 8 * 256
        view = CacheView(mean.data_ptr(), self.layers * page, page, self.blocks, BLOCK_SIZE, self.layers,
                         ring.data_ptr(), CAPACITY, self.ring_blocks, self.layers * CAPACITY, CAPACITY)
        data = self.key_z[i].data_ptr()
        rows_in = RowsView(data, data + 512, 512, 512, self.rows * 512, self.rows * 512)
        slots, bases = self.slots[i].data_ptr(), self.bases[i].data_ptr()
        positions, qsl = self.positions[i].data_ptr(), self.qsl.data_ptr()
        stream = torch.cuda.current_stream().cuda_stream
        if self.kind == "decode":
            error = lib.kvs_decode(c.byref(view), c.byref(DecodeStep(self.rows, rows_in, slots, positions, bases)), stream)
        elif self.kind == "verify":
            step = VerifyStep(self.rows, self.requests, rows_in, slots, qsl, self.seq_lens[i].data_ptr(), bases)
            error = lib.kvs_verify(c.byref(view), c.byref(step), stream)
        else:
            step = PrefillStep(self.rows, self.requests, rows_in, slots, positions, qsl, bases)
            error = lib.kvs_prefill(c.byref(view), c.byref(step), stream)
        assert error == 0, error


def graph_us(launch, count, launches, flush):
    """Median microseconds of launch(i), i running over `count` slices."""
    for i in range(min(count, 3)):
        launch(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            launch(i % count)
    times = []
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(25):
        if flush is not None:
            torch.sum(flush)  # reads only: nothing is left to be written back
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / launches)
    return statistics.median(times[5:])


def bandwidth():
    n = 2 << 30
    a, b = torch.ones(n // 4, device="cuda"), torch.empty(n // 4, device="cuda")
    read = n / graph_us(lambda i: torch.sum(a), 1, 5, None) / 1e6
    copy = 2 * n / graph_us(lambda i: torch.mul(a, 1, out=b), 1, 5, None) / 1e6
    return read, copy


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", required=True)
    parser.add_argument("--json")
    parser.add_argument("--cases", default="", help="only cases whose name contains this")
    parser.add_argument("libraries", nargs="+")
    args = parser.parse_args()
    module, libs = load_engine(args.engine), [load_ours(path) for path in args.libraries]
    read, copy = bandwidth()
    print(f"{torch.cuda.get_device_name()}: read {read:.2f} TB/s (sum), copy {copy:.2f} TB/s (read + write)")

    def mixed(shape, g):
        return torch.randint(8, 8192, shape, device="cuda", generator=g)

    def closing(shape, g):
        return mixed(shape, g) // 8 * 8 + 7

    def start(shape, g):
        return torch.zeros(shape, dtype=torch.int64, device="cuda")

    def resumed(shape, g):
        return start(shape, g) + 8195

    cases = [
        ("decode 1 closing", "decode", 1, 1, closing, 1),
        ("decode 256 mixed", "decode", 256, 1, mixed, 1),
        ("decode 1024 mixed", "decode", 1024, 1, mixed, 1),
        ("decode 1024 closing", "decode", 1024, 1, closing, 1),
        ("verify 256 x 4", "verify", 256, 4, mixed, 1),
        ("verify 1024 x 4", "verify", 1024, 4, mixed, 1),
        ("prefill 2048", "prefill", 1, 2048, start, 1),
        ("prefill 2048 resumed", "prefill", 1, 2048, resumed, 1),
        ("prefill 8192", "prefill", 1, 8192, start, 1),
        ("prefill 16 x 512", "prefill", 16, 512, mixed, 1),
        ("prefill 131072", "prefill", 1, 131072, start, 1),
        ("decode 256 mixed, 23 layers", "decode", 256, 1, mixed, LAYERS),
    ]
    flush = torch.ones(64 << 20, device="cuda")
    results, equal = [], True
    print("| case | | engine us | ours us | ratio | GB/s | % read | % copy | equal |\n|---|---|---|---|---|---|---|---|---|")
    for name, kind, requests, q, positions, layers in cases:
        if args.cases not in name:
            continue
        footprint = requests * layers * (q * 1024 + 10 * 1024 + 512)
        count = max(2, min(256, COLD_BYTES // footprint + 1))
        s = Slices(kind, requests, q, count, positions, layers)
        groups = [s.groups(module, i) for i in range(count)] if kind == "prefill" else None
        theirs_state = s.state()
        for i in range(count):
            s.engine(module, *theirs_state, i, groups)
        states, same = [], True
        for lib in libs:
            state = s.state()
            for i in range(count):
                s.ours(lib, *state, i)
            same = same and all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(state, theirs_state))
            states.append(state)
        equal = equal and same
        grouping = graph_us(lambda i: s.groups(module, i), count, count, flush) if kind == "prefill" else 0.0
        for cold in (True, False):
            n, where = (count, flush) if cold else (1, None)
            launches = count if cold else (20 if q * requests > 10000 else 100)
            theirs = graph_us(lambda i: s.engine(module, *theirs_state, i, groups), n, launches, where)
            theirs_all = theirs + grouping / LAYERS
            ours = [graph_us(lambda i: s.ours(lib, *state, i), n, launches, where) for lib, state in zip(libs, states)]
            gbs = s.bytes / ours[0] / 1e3
            results.append(dict(case=name, cold=cold, engine_us=theirs, grouping_us=grouping, ours_us=ours,
                                ratio=ours[0] / theirs_all, bytes=s.bytes, gb_per_s=gbs, equal=same))
            grouped = f" + {grouping:.1f}/{LAYERS}" if kind == "prefill" else ""
            print(f"| {name} | {'cold' if cold else 'warm'} | {theirs:.2f}{grouped} | "
                  f"{', '.join(f'{t:.2f}' for t in ours)} | {ours[0] / theirs_all:.2f} | {gbs:.0f} | "
                  f"{gbs / read / 10:.0f} | {gbs / copy / 10:.0f} | {'yes' if same else 'NO'} |", flush=True)
        del s, states, theirs_state, groups
        torch.cuda.empty_cache()
    if args.json:
        with open(args.json, "w") as f:
            json.dump(dict(device=torch.cuda.get_device_name(), read_tb_per_s=read, copy_tb_per_s=copy,
                           libraries=args.libraries, results=results), f, indent=1)
    print("all bytes equal" if equal else "BYTES DIFFER")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
