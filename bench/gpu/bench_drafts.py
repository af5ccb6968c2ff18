"""Milliseconds of a round of an EAGLE-3 head of an 8B model: captured, launched one by one, and the time of its bytes.

A round writes the entries of three accepted tokens a sequence and proposes chains, or with --top-k tables of trees of
so many levels; it ends when the host has them.  `bytes` is the time in which the head's weights are read as often as a
round reads them.

    python bench/gpu/bench_drafts.py [--rows 1 8 64] [--drafts 4] [--top-k 1]
"""

from __future__ import annotations

import argparse
import statistics
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from edgellm.decoding.chain import KeptRow
from edgellm.decoding.device_drafts import DevicePasses
from edgellm.decoding.device_trees import DeviceTreePasses
from edgellm.decoding.draft_ops import DeviceDraftOps
from edgellm.decoding.draft_passes import DraftEntries
from edgellm.models.config import ModelConfig, RopeConfig
from edgellm.models.device_ops import cuda_ops
from edgellm.models.registry import Architecture
from edgellm.runtime.cuda_graphs import EagerRunner
from edgellm.runtime.device_cuda import CudaDevice
from edgellm.runtime.kv_cache import KVCache
from edgellm_eagle.checkpoint import HeadWeights
from edgellm_eagle.head import Eagle3Head

REPEATS = 30
PROMPT, ACCEPTED, PAGE, PAGES = 500, 3, 32, 24
DRAFT_VOCAB = 32_000
BYTES_PER_SECOND = 4.8e12  # of an H200's memory
CONFIG = ModelConfig(
    architecture=Architecture.LLAMA,
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=1,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_positions=PAGE * PAGES,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=500_000.0),
    tied_embeddings=False,
)


def random_weights() -> HeadWeights:
    def new(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda") * 0.02

    size, inner = CONFIG.hidden_size, CONFIG.intermediate_size
    norms = {name: torch.ones(size, device="cuda") for name in ("hidden_norm", "input_norm", "mlp_norm", "final_norm")}
    return HeadWeights(
        **norms,
        fc=new(size, 3 * size),
        qkv=new(CONFIG.q_size + 2 * CONFIG.kv_size, 2 * size),
        o=new(size, CONFIG.q_size),
        gate_up=new(2 * inner, size),
        down=new(size, inner),
        lm_head=new(DRAFT_VOCAB, size),
        embedding=new(CONFIG.vocab_size, size),
        to_target=torch.arange(DRAFT_VOCAB, device="cuda"),
    )


class Rounds:
    """A head, and so many sequences that have read their prompts."""

    def __init__(self, weights: HeadWeights, rows: int, drafts: int, top_k: int) -> None:
        device, ops = CudaDevice("cuda"), cuda_ops()
        executor: Any = SimpleNamespace(device=device, ops=ops, table_shape=(rows, PAGES))
        head = Eagle3Head(CONFIG, weights, DeviceDraftOps(ops, device.torch_device))
        kv_cache = KVCache.for_model(
            CONFIG, num_pages=rows * PAGES, page_size=PAGE, dtype=torch.bfloat16, device=device.torch_device
        )
        if top_k > 1:
            self.passes: Any = DeviceTreePasses(head, kv_cache, executor, top_k, drafts)
            self._propose = self.passes.tables
        else:
            self.passes = DevicePasses(head, kv_cache, executor, drafts)
            self._propose = self.passes.chains
        self._slots, self._drafts = list(range(rows)), drafts
        self._table = np.arange(rows * PAGES, dtype=np.int32).reshape(rows, PAGES)
        self._hidden = torch.randn((PROMPT, head.hidden_width), dtype=torch.bfloat16, device="cuda")
        for slot in self._slots:
            self._write([slot], 0, PROMPT, [self._kept(slot, PROMPT, 0)])

    def run(self) -> None:
        """One round; entries are written to the same places every time."""
        self.passes.hold([self._kept(slot, ACCEPTED, ACCEPTED * slot) for slot in self._slots])
        self._write(self._slots, PROMPT, ACCEPTED)
        past = [PROMPT + ACCEPTED] * len(self._slots)
        self._propose(self._slots, past, [self._drafts] * len(self._slots), self._table)

    def _kept(self, slot: int, count: int, first: int) -> KeptRow:
        inputs = np.zeros(count, np.int32)
        return KeptRow(slot, PROMPT, inputs, [1], step_hidden=self._hidden, first=first)

    def _write(self, slots: list[int], past: int, count: int, fresh: list[KeptRow] | None = None) -> None:
        tokens = [1 + number % 1000 for number in range(count * len(slots))]
        entries = DraftEntries(slots, [past] * len(slots), [count] * len(slots), tokens, self._table)
        self.passes.write(entries, fresh or ())


def wall_ms(rounds: Rounds) -> float:
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        rounds.run()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def bytes_ms(weights: HeadWeights, drafts: int) -> float:
    once = weights.fc.nbytes
    often = sum(tensor.nbytes for tensor in (weights.qkv, weights.o, weights.gate_up, weights.down, weights.lm_head))
    return (once + drafts * often) / BYTES_PER_SECOND * 1e3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--top-k", type=int, default=1)
    options = parser.parse_args()
    weights = random_weights()
    what = f"{options.drafts} drafts" if options.top_k == 1 else f"{options.drafts} levels of {options.top_k}"
    print(f"EAGLE-3, 8B, bfloat16, {what}; ms a round; {torch.cuda.get_device_name()}")
    for rows in options.rows:
        rounds = Rounds(weights, rows, options.drafts, options.top_k)
        rounds.run()
        captured = wall_ms(rounds)
        rounds.passes._staging._runner = EagerRunner()
        rounds.run()
        launched = wall_ms(rounds)
        floor = bytes_ms(weights, options.drafts)
        print(f"rows {rows:4d}: captured {captured:7.3f}  launched {launched:7.3f}  bytes {floor:7.3f}")


if __name__ == "__main__":
    main()
