"""transformers on the same shapes, random weights, the same run: eager decode in a CUDA graph, continuous batching."""

from __future__ import annotations

import argparse
import importlib.util
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from bench_end_to_end import NEW, PAST, prompt_of
from random_engine import SHAPES, VOCAB

Say = Callable[..., None]
BLOCK = 256


def build(name: str) -> Any:
    """A Qwen3 of that size in bfloat16 on the GPU."""
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    shape = SHAPES[name]
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=shape["hidden_size"],
        intermediate_size=shape["intermediate_size"],
        num_hidden_layers=shape["num_layers"],
        num_attention_heads=shape["num_heads"],
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=shape["tied"],
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model = Qwen3ForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
    model.generation_config = GenerationConfig(do_sample=False, max_new_tokens=NEW, pad_token_id=0, eos_token_id=None)
    return model


@torch.no_grad()
def graph_decode(name: str, model: Any, batch: int, say: Say) -> None:
    """Greedy decode of eager modules, one step captured in a CUDA graph, over a static cache."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=PAST + NEW + 8)
    prompt = torch.randint(0, VOCAB, (batch, PAST), device="cuda")
    token = model(prompt, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1:].argmax(-1)
    place = torch.full((batch, 1), PAST, device="cuda", dtype=torch.long)

    def step() -> None:
        out = model(token, position_ids=place, past_key_values=cache, use_cache=True)
        token.copy_(out.logits[:, -1:].argmax(-1))
        place.add_(1)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    steps = NEW - 8
    for layer in cache.layers:
        layer.cumulative_length.fill_(PAST)
    place.fill_(PAST)
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(steps):
        graph.replay()
    torch.cuda.synchronize()
    each = (time.perf_counter() - started) / steps
    say(name, f"transformers, CUDA graph of eager decode, batch {batch}", tok_s=batch / each, ms_per_step=each * 1e3)


class Continuous:
    """transformers' continuous batching over one model."""

    def __init__(self, model: Any, requests: int, longest: int) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        flash = importlib.util.find_spec("flash_attn") is not None
        self.attention = "paged|flash_attention_2" if flash else "paged|sdpa"
        model.set_attn_implementation(self.attention)
        self._manager = model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, max_new_tokens=NEW, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=ContinuousBatchingConfig(
                block_size=BLOCK,
                num_blocks=700,
                max_batch_tokens=8192 if flash else 2048,
                max_requests_per_batch=requests,
                max_blocks_per_request=(longest + NEW) // BLOCK + 2 if flash else None,
            ),
        )
        if hasattr(self._manager, "warmup"):
            self._manager.warmup()
        self._manager.start()

    def run(self, prompts: list[list[int]], tokens: int, limit: float) -> list[Any]:
        """Submit all at once; the results once all have finished.

        Raises:
            TimeoutError: they did not within `limit` seconds.
            RuntimeError: one of them failed.
        """
        ids = [self._manager.add_request(p, max_new_tokens=tokens, record_timestamps=True) for p in prompts]
        found: dict[Any, Any] = {}
        ends = time.perf_counter() + limit
        while len(found) < len(ids):
            if time.perf_counter() > ends or not self._manager.is_running():
                raise TimeoutError(f"{len(found)} of {len(ids)} requests finished")
            result = self._manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                if result.error:
                    raise RuntimeError(result.error)
                found[result.request_id] = result
        return [found[one] for one in ids]

    def close(self) -> None:
        self._manager.stop(block=True, timeout=20)


def first_token_ms(result: Any) -> float:
    return (result.timestamps[0] - result.created_time) * 1e3


def continuous(name: str, model: Any, options: argparse.Namespace, left: Callable[[], float], say: Say) -> None:
    peer = Continuous(model, max(options.requests, 8), options.longest)
    label = f"transformers, continuous batching {peer.attention}"
    try:
        peer.run([prompt_of(16, 1, VOCAB)], 4, 60)
        dice = random.Random(0)
        prompts = [prompt_of(dice.randint(128, 1024), 1000 + index, VOCAB) for index in range(options.requests)]
        for round_name in ("cold", "the same prompts again"):
            started = time.perf_counter()
            results = peer.run(prompts, NEW, max(5.0, left()))
            seconds = time.perf_counter() - started
            first = sorted(map(first_token_ms, results))
            tokens = sum(len(result.generated_tokens) for result in results)
            say(
                name,
                f"{label}, {options.requests} requests x {NEW} tokens, {round_name}",
                out_tok_s=tokens / seconds,
                s=seconds,
                ttft_ms_p50=first[len(first) // 2],
                ttft_ms_max=first[-1],
            )
        (single,) = peer.run([prompt_of(PAST, 5, VOCAB)], NEW, max(5.0, left()))
        gaps = [after - before for before, after in zip(single.timestamps[8:], single.timestamps[9:], strict=False)]
        say(name, f"{label}, one request", tok_s=1 / statistics.mean(gaps))
        for length in (100, 4096, options.longest):
            peer.run([prompt_of(length, 70 + length, VOCAB)], 2, max(5.0, left()))
            prompt = prompt_of(length, 90 + length, VOCAB)
            cold, warm = (first_token_ms(peer.run([prompt], 2, max(5.0, left()))[0]) for _ in range(2))
            say(name, f"{label}, first token of {length}", cold_ms=cold, warm_ms=warm)
    finally:
        peer.close()


def run_peers(name: str, options: argparse.Namespace, left: Callable[[], float], say: Say) -> None:
    """Every peer that is installed and for which time is left; one that fails says so and costs the others nothing."""
    try:
        import transformers
    except ImportError:
        print("transformers is not installed: no peers")
        return
    print(f"transformers {transformers.__version__}")
    model = build(name)
    tests: list[Callable[[], None]] = [
        *(lambda batch=batch: graph_decode(name, model, batch, say) for batch in options.batches),
        lambda: continuous(name, model, options, left, say),
    ]
    for test in tests:
        if left() < 10:
            print("time is up before the next peer")
            return
        try:
            test()
        except (RuntimeError, TimeoutError, TypeError, ValueError, AttributeError, ImportError) as error:
            print(f"a peer failed: {type(error).__name__}: {str(error)[:300]}")
