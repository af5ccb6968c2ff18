"""Steps of models with the layers of published ones, fewer of them and random weights: prompts and decode rows.

Run: PYTHONPATH=. python bench/gpu/bench_families.py [--models gemma4 granite] [--batches 1 16]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from edgellm.models.config import ModelConfig, config_from_hf
from edgellm.models.device_ops import cuda_ops, reference_ops
from edgellm.runtime.batch import RaggedBatch
from edgellm.runtime.device import CpuDevice
from edgellm.runtime.device_cuda import CudaDevice
from edgellm.runtime.executor_cuda import CudaExecutor, ExecutorLimits, attention_mode
from edgellm.runtime.kv_cache import KVCache
from edgellm.runtime.recurrent_state_device import DeviceRecurrentState
from edgellm.testing.random_model import random_model

PAGE_SIZE = 16
LONGEST = 8192
CHUNK = 2048
BASE: dict[str, Any] = {"vocab_size": 32_768, "max_position_embeddings": 1 << 16, "rms_norm_eps": 1e-6}
ROPE = {"rope_type": "default", "rope_theta": 1e6}
HYBRID = BASE | {
    "hidden_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "tie_word_embeddings": True,
    "rope_parameters": ROPE | {"partial_rotary_factor": 0.25},
}
GEMMA = BASE | {
    "hidden_size": 2560,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 512,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2,
    "rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE},
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3.5": HYBRID | {"architectures": ["Qwen3_5ForCausalLM"], "intermediate_size": 6144},
    "qwen3-next": HYBRID
    | {
        "architectures": ["Qwen3NextForCausalLM"],
        "intermediate_size": 5120,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
    },
    "mamba2": BASE
    | {
        "architectures": ["Mamba2ForCausalLM"],
        "hidden_size": 2048,
        "num_hidden_layers": 12,
        "num_heads": 64,
        "head_dim": 64,
        "state_size": 128,
        "n_groups": 1,
        "conv_kernel": 4,
        "expand": 2,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    },
    "granite": BASE
    | {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "hidden_size": 1536,
        "intermediate_size": 512,
        "shared_intermediate_size": 1024,
        "num_hidden_layers": 10,
        "layer_types": ["mamba"] * 5 + ["attention"] + ["mamba"] * 4,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "num_local_experts": 62,
        "num_experts_per_tok": 6,
        "mamba_n_heads": 48,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.0078125,
        "logits_scaling": 6.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    },
    "gemma3": GEMMA
    | {"architectures": ["Gemma3ForCausalLM"], "intermediate_size": 10_240, "query_pre_attn_scalar": 256},
    "gemma4": GEMMA
    | {
        "architectures": ["Gemma4ForCausalLM"],
        "intermediate_size": 10_240,
        "global_head_dim": 512,
        "num_kv_shared_layers": 6,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": BASE["vocab_size"],
    },
}


def make_executor(config: ModelConfig, slots: int, device: str) -> CudaExecutor:
    """In bfloat16, without the usual captures at start: each shape is captured when it first runs."""
    on_gpu = device != "cpu"
    ops, where = (cuda_ops(), CudaDevice(device)) if on_gpu else (reference_ops(), CpuDevice())
    model = random_model(config, dtype=torch.bfloat16, device=device)
    pages = slots * -(-LONGEST // PAGE_SIZE)
    kv_cache = KVCache.for_model(config, num_pages=pages, page_size=PAGE_SIZE, dtype=model.dtype, device=device)
    recurrent = None
    if config.recurrent_pieces:
        recurrent = DeviceRecurrentState(
            config.recurrent_pieces, slots, device=where.torch_device, scatter=ops.scatter_state
        )
    return CudaExecutor(
        model,
        kv_cache,
        device=where,
        ops=ops,
        limits=ExecutorLimits(num_slots=slots, pages_per_slot=-(-LONGEST // PAGE_SIZE), step_tokens=CHUNK),
        mode=attention_mode(model.dtype, deterministic=False),
        recurrent=recurrent,
    )


def make_batch(rows: int, past: int, tokens: int, slots: int) -> RaggedBatch:
    """`rows` sequences that add `tokens` tokens each behind `past`; logits of the last of each."""
    count, pages = rows * tokens, -(-LONGEST // PAGE_SIZE)
    starts = np.arange(0, count + 1, tokens, dtype=np.int32)
    return RaggedBatch(
        token_ids=np.arange(2, count + 2, dtype=np.int32),
        positions=np.tile(np.arange(past, past + tokens, dtype=np.int32), rows),
        query_start=starts,
        query_len=np.full(rows, tokens, np.int32),
        past_len=np.full(rows, past, np.int32),
        state_index=np.arange(rows, dtype=np.int32),
        page_rows=np.arange(slots * pages, dtype=np.int32).reshape(slots, pages),
        logits_index=(starts[1:] - 1).astype(np.int64),
        logits_to_seq=np.arange(rows, dtype=np.int32),
    )


def milliseconds(work: Callable[[], object], repeats: int) -> float:
    """Of one call, the best of three rounds; host and device overlap as they do in a session."""
    times = []
    for _ in range(4):
        started = time.perf_counter()
        for _ in range(repeats):
            work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append((time.perf_counter() - started) / repeats * 1e3)
    return min(times[1:])


def run(name: str, options: argparse.Namespace) -> None:
    config, slots = config_from_hf(MODELS[name]), max(options.batches)
    executor = make_executor(config, slots, options.device)
    shapes = [(1, past, options.chunk) for past in options.past]
    shapes += [(rows, past + options.chunk, 1) for rows in options.batches for past in options.past]
    for rows, past, tokens in shapes:
        batch = make_batch(rows, past, tokens, slots)
        taken = milliseconds(lambda batch=batch: executor.forward(batch), 3 if tokens > 1 else options.repeats)
        what = f"a chunk of {tokens}" if tokens > 1 else f"{rows} decode rows"
        print(
            f"{name:10} {config.num_layers} layers, {what} behind {past}: {taken:.3f} ms, "
            f"{taken / config.num_layers * 1e3:.0f} us a layer",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--past", nargs="+", type=int, default=[0, 4096])
    parser.add_argument("--chunk", type=int, default=CHUNK)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    for name in options.models:
        run(name, options)


if __name__ == "__main__":
    main()
