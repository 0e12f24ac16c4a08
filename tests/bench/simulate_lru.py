#!/usr/bin/python3
"""Hit rates of an LRU of prompt blocks that evicts the tail of a prefix before its head, from a trace alone.

    tests/bench/simulate_lru.py TRACE [--block-size=64] [--requests=N] [CAPACITY...]

Requests come one after the other. One looks for its longest leading run of whole prompt blocks, then stores the
others. A capacity is in blocks, or a share of the distinct blocks as "10%". Prints one JSON object a line: first
the trace's numbers with the hit rate of a store without bounds, then one for each capacity.

Written from the policy's definition to check the daemon by (tests/bench/hit_rates.sh); shares no code with it.
"""
import argparse
import heapq
import json

CHUNK_TOKENS = 512  # that one hash id of the trace stands for


def read_prompts(path, block_size, limit):
    """Of each request: tokens of its prompt, and what its whole blocks are known by."""
    per_chunk = CHUNK_TOKENS // block_size
    prompts = []
    with open(path, encoding="utf-8") as trace:
        for line in trace:
            if limit and len(prompts) == limit:
                break
            request = json.loads(line)
            ids = request["hash_ids"]
            tokens = request["input_length"]
            blocks = [ids[b // per_chunk] * per_chunk + b % per_chunk for b in range(tokens // block_size)]
            prompts.append((tokens, blocks))
    return prompts


class Lru:
    """Blocks of prefixes. The victim is the least recently used block that no stored block continues."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.used_at = {}  # block -> (request, -depth): within a request the head counts as used last
        self.parent = {}
        self.children = {}
        self.leaves = []  # heap of (used_at, block), some of them out of date

    def touch(self, block, now):
        self.used_at[block] = now
        if not self.children[block]:
            heapq.heappush(self.leaves, (now, block))

    def evict(self):
        while True:
            used_at, block = heapq.heappop(self.leaves)
            if self.used_at.get(block) != used_at or self.children[block]:
                continue  # touched, gone or continued since
            del self.used_at[block], self.children[block]
            parent = self.parent.pop(block)
            if parent in self.children:
                self.children[parent] -= 1
                if not self.children[parent]:
                    heapq.heappush(self.leaves, (self.used_at[parent], parent))
            return

    def request(self, number, blocks):
        """How many leading blocks are found; stores the others."""
        found = 0
        while found < len(blocks) and blocks[found] in self.used_at:
            found += 1
        for depth, block in enumerate(blocks):
            if block in self.used_at:
                self.touch(block, (number, -depth))
                continue
            parent = blocks[depth - 1] if depth else None
            if len(self.used_at) == self.capacity:
                self.evict()  # never this request's own: those were used last
            self.parent[block] = parent
            self.children[block] = 0
            if parent is not None:
                self.children[parent] += 1
            self.touch(block, (number, -depth))
        return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("trace")
    parser.add_argument("capacities", nargs="*")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--requests", type=int, default=0)
    arguments = parser.parse_intermixed_args()

    prompts = read_prompts(arguments.trace, arguments.block_size, arguments.requests)
    tokens = sum(prompt_tokens for prompt_tokens, _ in prompts)
    seen = set()
    found = 0
    for _, blocks in prompts:
        run = 0
        while run < len(blocks) and blocks[run] in seen:
            run += 1
        found += run
        seen.update(blocks)
    print(json.dumps({"requests": len(prompts), "prompt_tokens": tokens, "distinct_blocks": len(seen),
                      "hit_rate": found * arguments.block_size / tokens}))
    for text in arguments.capacities:
        capacity = round(len(seen) * float(text[:-1]) / 100) if text.endswith("%") else int(text)
        assert capacity > max(len(blocks) for _, blocks in prompts), f"{text} does not hold the longest prompt"
        lru = Lru(capacity)
        found = sum(lru.request(number, blocks) for number, (_, blocks) in enumerate(prompts))
        print(json.dumps({"capacity": capacity, "hit_rate": found * arguments.block_size / tokens}), flush=True)


if __name__ == "__main__":
    main()
