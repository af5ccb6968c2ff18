"""What an EAGLE-3 head would gain on a large target: random weights of an 8B, and proposals kept by the toss of a coin.

No trained head of that size is at hand.  Everything runs as it would: the head's passes, verification, the one wait a
round; only which proposals are kept is not asked of the weights.  A proposal at depth j is kept with the j-th of
`--shares`, by default what the head of the default model keeps of held-out text (training/README.md).  Texts mean
nothing; tokens a second do.  Plain and speculative engines answer by turns.

    export PYTHONPATH=.:bench/gpu:$(echo plugins/*/src | tr ' ' ':')
    python bench/gpu/bench_simulated_acceptance.py [--model 8B] [--batches 1 4 8] [--drafts 3 5]
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from random_engine import qwen3_config

import edgellm.decoding.chain
import edgellm.plugins
import edgellm_eagle.plugin
from edgellm import Engine, SamplingParams, SpeculativeOptions
from edgellm.assembly import LoadOptions, connect
from edgellm.decoding.verify import VerifiedRun, verify_runs
from edgellm.models.config import ModelConfig
from edgellm.runtime.placement import place
from edgellm.testing.random_model import random_model
from edgellm.testing.toy_tokenizer import ToyTokenizer
from edgellm_eagle.checkpoint import save_head

SHARES = (0.650, 0.649, 0.690, 0.691, 0.732, 0.740)
PROMPT, ROUNDS = 200, 3


class Coins:
    """Stands in for verification: as many proposals are kept as coins say, at the full cost of verifying them."""

    def __init__(self, shares: Sequence[float]) -> None:
        self.shares = shares
        self.rounds = self.tokens = 0
        self._random = random.Random(7)

    def __call__(self, logits: torch.Tensor, proposals: Sequence[Any], *given: Any) -> list[VerifiedRun]:
        return [
            self._kept(list(chain), run) if len(chain) else run
            for chain, run in zip(proposals, verify_runs(logits, proposals, *given), strict=True)
        ]

    def _kept(self, chain: list[int], run: VerifiedRun) -> VerifiedRun:
        count = 0
        while count < len(chain) and self._random.random() < self.shares[min(count, len(self.shares) - 1)]:
            count += 1
        self.rounds, self.tokens = self.rounds + 1, self.tokens + count + 1
        return VerifiedRun([*chain[:count], run.token_ids[-1]], nodes=list(range(count + 1)))


def write_head(folder: Path, target: ModelConfig, draft_vocab: int, device: str) -> Path:
    """A random head for the target, in the public layout."""
    hidden, inner = target.hidden_size, target.intermediate_size

    def new(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, dtype=torch.bfloat16, device=device) * 0.02).cpu()

    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    widths = {"q": target.q_size, "k": target.kv_size, "v": target.kv_size}
    tensors = {
        "fc.weight": new(hidden, 3 * hidden),
        "norm.weight": torch.ones(hidden),
        "lm_head.weight": new(draft_vocab, hidden),
        "d2t": torch.zeros(draft_vocab, dtype=torch.int64),
        **{f"midlayer.{name}.weight": torch.ones(hidden) for name in norms},
        **{f"midlayer.self_attn.{name}_proj.weight": new(width, 2 * hidden) for name, width in widths.items()},
        "midlayer.self_attn.o_proj.weight": new(hidden, target.q_size),
        "midlayer.mlp.gate_proj.weight": new(inner, hidden),
        "midlayer.mlp.up_proj.weight": new(inner, hidden),
        "midlayer.mlp.down_proj.weight": new(hidden, inner),
    }
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": draft_vocab,
        "num_hidden_layers": 1,
        "rms_norm_eps": target.rms_norm_eps,
        "rope_theta": target.rope.theta,
        "max_position_embeddings": target.max_positions,
    }
    save_head(folder, config, tensors)
    return folder


def open_engines(options: argparse.Namespace, folder: Path) -> dict[int, Engine]:
    """By proposals a round, 0 for plain decoding; all over one set of weights."""
    config = qwen3_config(options.model)
    choice = partial(
        LoadOptions,
        "random " + options.model,
        device=options.device,
        dtype=options.dtype,
        max_batch_size=max(options.batches),
        max_model_len=PROMPT + options.new_tokens,
        kv_budget=max(options.batches) * 2 * (PROMPT + options.new_tokens),
    )
    placement = place(options.device, choice().placement_options())
    model = random_model(config, dtype=getattr(torch, options.dtype), device=options.device)
    head = write_head(folder / "head", config, min(32_000, config.vocab_size), options.device)
    speculation = partial(SpeculativeOptions, decoder="eagle", draft=head, adaptive=options.adaptive)
    made = {}
    for drafts in (0, *options.drafts):
        given = choice(speculative=speculation(num_drafts=drafts) if drafts else None)
        made[drafts] = Engine.from_parts(connect(given, placement, model, ToyTokenizer(config.vocab_size)))
    return made


def seconds_of(engine: Engine, batch: int, options: argparse.Namespace) -> float:
    prompts = [[1 + (row * 31 + place * 7) % 500 for place in range(PROMPT)] for row in range(batch)]
    params = SamplingParams(max_tokens=options.new_tokens, temperature=0.0, ignore_eos=True)
    began = time.perf_counter()
    engine.generate(prompts, params)
    return time.perf_counter() - began


def report(engines: dict[int, Engine], coins: Coins, batch: int, options: argparse.Namespace) -> None:
    seconds: dict[int, list[float]] = {drafts: [] for drafts in engines}
    kept: dict[int, float] = {}
    for number in range(ROUNDS + 1):
        for drafts, engine in engines.items():
            coins.rounds = coins.tokens = 0
            took = seconds_of(engine, batch, options)
            kept[drafts] = coins.tokens / coins.rounds if coins.rounds else 1.0  # of rounds with proposals
            if number:  # the first warms up: graphs, cached prompts
                seconds[drafts].append(took)
    plain = statistics.median(seconds[0])
    for drafts in options.drafts:
        ours, tokens = statistics.median(seconds[drafts]), batch * options.new_tokens
        print(
            f"{batch:3} {drafts:6} {tokens / plain:9.0f} {tokens / ours:9.0f} {plain / ours:6.3f} {kept[drafts]:7.3f} "
            f"{ours / options.new_tokens * kept[drafts] * 1e3:9.2f} {plain / options.new_tokens * 1e3:9.2f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="8B")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--drafts", type=int, nargs="+", default=[3, 5])
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES)
    parser.add_argument("--adaptive", action="store_true", help="lengths that adapt, not all the same")
    parser.add_argument("--new-tokens", type=int, default=192)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    plugins = [("eagle", edgellm_eagle.plugin)]
    edgellm.plugins.load_plugins = partial(edgellm.plugins.load_plugins, extra=plugins, autoload=False, strict=True)
    coins = Coins(options.shares)
    edgellm.decoding.chain.verify_runs = coins
    card = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(f"{card}, torch {torch.__version__}, {options.model}, {options.dtype}")
    print(f"acceptance SIMULATED: {options.shares}; {'adaptive' if options.adaptive else 'fixed'} lengths")
    print("  N drafts plain t/s draft t/s  ratio t/round  ms/round  ms/plain")
    with tempfile.TemporaryDirectory() as folder:
        engines = open_engines(options, Path(folder))
        for batch in options.batches:
            report(engines, coins, batch, options)
        for engine in engines.values():
            engine.shutdown()


if __name__ == "__main__":
    main()
