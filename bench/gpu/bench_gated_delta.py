"""Layers of a gated delta net on CUDA: microseconds a call, GB/s and the ratio to what others do.

Decode and verification are held against the bytes of the state, which is read and written once (and written once more
a verified token); prompts against our own token-by-token form as well.  Calls are replayed from CUDA graphs over
states that together exceed the L2 cache.  Run by hand: `python bench/gpu/bench_gated_delta.py [--part PART]`.

Every case is compared with each peer before anything is timed, as the norm of the difference over the norm: within 1 %,
chunks and a whole layer within 2 %.  flash-linear-attention picks a kernel's configuration at its first call, whatever
the batch, so the larger batches come first.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from bench_elementwise import graph_of, replay_us
from delta_peer import LayerWeights, Peer, Rule, peers

from edgellm.kernels.cu.causal_conv import causal_conv
from edgellm.kernels.cu.gated_delta import gated_delta, gated_delta_workspace
from edgellm.kernels.cu.gated_norm import gated_norm
from edgellm.kernels.cu.gates import delta_gates
from edgellm.kernels.cu.state_rows import StateRows

DTYPE = torch.bfloat16
KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM, TAPS = 16, 32, 128, 128, 4  # Qwen3-Next and the larger Qwen3.5
WIDTHS = (KEY_HEADS * KEY_DIM, KEY_HEADS * KEY_DIM, HEADS * VALUE_DIM)  # of q, k and v
CHANNELS = sum(WIDTHS)
EPS = 1e-6
BATCHES = (64, 16, 4, 1)
PROMPTS = ((1, 2048), (1, 8192), (8, 512), (1, 512))
CHUNKED = 64  # tokens from which peers take chunks
CLOSE, CHUNKS_CLOSE = 1e-2, 2e-2
PEAK_GBPS = 4548  # what a copy reaches on one H200
ROTATED_BYTES = 320 << 20
MAX_SETS = 24
REPLAYS = 12
PEERS = peers()


@dataclass(slots=True)
class Call:
    """One set of buffers: our call, the bytes that must move, and the peers' calls by name; None: not asked for."""

    ours: Callable[[], None]
    num_bytes: int
    theirs: dict[str, Held] | None


class Held:
    """A peer's call that keeps its results until the next, so that calls of one graph write to different memory."""

    def __init__(self, run: Callable[[], object]) -> None:
        self.run = run
        self.results: object = None

    def __call__(self) -> None:
        self.results = self.run()


def present() -> dict[str, Peer]:
    return {name: peer for name, peer in PEERS.items() if peer is not None}


def check(what: str, bound: float, *pairs: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Ours against theirs; wrong results are not timed."""
    for ours, theirs in pairs:
        apart = float((ours.float() - theirs.float()).norm() / theirs.float().norm())
        if not apart < bound:
            raise SystemExit(f"{what}: {apart:.2%} apart, over {bound:.0%}")


def rows_of(batch: int, length: int, *, verified: bool = False) -> StateRows:
    starts = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * length
    slots = torch.arange(batch, device="cuda", dtype=torch.int32)
    return StateRows(starts, slots, starts[:-1].clone() if verified else None)


def delta_inputs(batch: int, length: int) -> dict[str, torch.Tensor]:
    tokens = batch * length
    q, k, v = torch.randn(tokens, CHANNELS, device="cuda", dtype=DTYPE).split(WIDTHS, dim=1)
    return {
        "q": q.view(tokens, KEY_HEADS, KEY_DIM),
        "k": k.view(tokens, KEY_HEADS, KEY_DIM),
        "v": v.view(tokens, HEADS, VALUE_DIM),
        "decay": -torch.rand(tokens, HEADS, device="cuda").square(),
        "beta": torch.rand(tokens, HEADS, device="cuda"),
    }


def workspace_of(batch: int, length: int) -> torch.Tensor:
    size = gated_delta_workspace(
        batch * length, batch, key_heads=KEY_HEADS, heads=HEADS, key_dim=KEY_DIM, value_dim=VALUE_DIM, dtype=DTYPE
    )
    return torch.empty(size, device="cuda", dtype=torch.uint8)


def in_pieces(
    rule: Rule, pieces: list[list[torch.Tensor]], state: torch.Tensor
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outputs and the state after of every piece, as the calls return them."""
    outs, states = [], []
    for piece in pieces:
        out, state = rule(*piece, state)
        outs.append(out)
        states.append(state)
    return outs, states


def rule_calls(inputs: dict[str, torch.Tensor], state: torch.Tensor, piece: int) -> dict[str, Held]:
    """The peers' calls, each over pieces of that many tokens of every sequence, from its own copy of the state."""
    whole = [value.unflatten(0, (len(state), -1)) for value in inputs.values()]
    length = whole[0].shape[1]
    pieces = [[part[:, t : t + piece].contiguous() for part in whole] for t in range(0, length, piece)]
    return {
        name: Held(partial(in_pieces, peer.tokens if piece < CHUNKED else peer.chunks, pieces, state.clone()))
        for name, peer in present().items()
    }


def delta_call(
    batch: int,
    length: int,
    *,
    verified: bool = False,
    peer_keeps: bool = False,
    workspace: torch.Tensor | None = None,
    with_peer: bool = True,
) -> Call:
    """The rule alone.  Verified rows keep the state after every token; peers keep it where they take one at a time."""
    inputs = delta_inputs(batch, length)
    state = torch.randn(batch, HEADS, KEY_DIM, VALUE_DIM, device="cuda") * 0.1
    kept = torch.empty(batch * length, *state.shape[1:], device="cuda") if verified else None
    out = torch.empty_like(inputs["v"], memory_format=torch.contiguous_format)
    rows = rows_of(batch, length, verified=verified)
    theirs = rule_calls(inputs, state, 1 if peer_keeps else length) if with_peer else None

    def ours() -> None:
        gated_delta(
            **inputs,
            state=state,
            rows=rows,
            out=out,
            scale=KEY_DIM**-0.5,
            l2norm=True,
            checkpoint=kept,
            workspace=workspace,
        )

    if theirs:
        ours()
    for name, call in (theirs or {}).items():
        call()
        outs, states = call.results
        pairs = (
            (out, torch.cat(outs, dim=1).flatten(0, 1)),
            (kept if peer_keeps else state, torch.stack(states, dim=1).flatten(0, 1)),
        )
        check(f"{batch}x{length}, {name}", CLOSE if length < CHUNKED else CHUNKS_CLOSE, *pairs)
    moved = sum(value.numel() * value.element_size() for value in (*inputs.values(), out))
    moved += 2 * state.nbytes + (0 if kept is None else kept.nbytes)
    return Call(ours, moved, theirs)


def layer_weights() -> LayerWeights:
    taps = torch.randn(CHANNELS, TAPS, device="cuda", dtype=DTYPE)
    log_rate, bias = torch.randn(2, HEADS, device="cuda")
    return LayerWeights(taps.split(WIDTHS), log_rate, bias, torch.rand(VALUE_DIM, device="cuda"), EPS)


def layer_call(batch: int) -> Call:
    """All of a delta net in a decode step but its two linear layers."""
    x, gate = (torch.randn(batch, width, device="cuda", dtype=DTYPE) for width in (CHANNELS, WIDTHS[2]))
    a, b, decay, beta = torch.randn(4, batch, HEADS, device="cuda")
    weights, before = layer_weights(), last_inputs(batch)
    memory = torch.randn(batch, HEADS, KEY_DIM, VALUE_DIM, device="cuda") * 0.1
    theirs = layer_calls(x, gate, a, b, weights, before, memory)
    mixed, recalled, rows = torch.empty_like(x), torch.empty_like(gate), rows_of(batch, 1)
    q, k, v = mixed.split(WIDTHS, dim=1)
    heads = [q.view(-1, KEY_HEADS, KEY_DIM), k.view(-1, KEY_HEADS, KEY_DIM), v.view(-1, HEADS, VALUE_DIM)]
    taps, rate, state = torch.cat(weights.taps).float(), -weights.log_rate.exp(), ours_inputs(before)

    def ours() -> None:
        causal_conv(x, taps, None, state, rows, mixed, silu=True)
        delta_gates(a, b, rate, weights.bias, decay, beta)
        out = recalled.view(-1, HEADS, VALUE_DIM)
        gated_delta(*heads, decay, beta, memory, rows, out, scale=KEY_DIM**-0.5, l2norm=True)
        gated_norm(recalled, gate, weights.norm, EPS, recalled)

    if theirs:
        ours()
    for name, call in theirs.items():
        call()
        check(f"layer {batch}x1, {name}", CHUNKS_CLOSE, *zip((recalled, memory), call.results, strict=True))
    return Call(ours, 2 * (memory.nbytes + state.nbytes) + 4 * x.nbytes, theirs)


def layer_calls(
    x: torch.Tensor,
    gate: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    weights: LayerWeights,
    before: torch.Tensor,
    memory: torch.Tensor,
) -> dict[str, Held]:
    mixed = [part[:, None].contiguous() for part in x.split(WIDTHS, dim=1)]
    inputs = [part.contiguous() for part in before.split(WIDTHS, dim=1)]
    return {
        name: Held(partial(peer.layer, mixed, gate, a[:, None], b[:, None], weights, inputs, memory.clone()))
        for name, peer in present().items()
        if peer.layer is not None
    }


def last_inputs(batch: int) -> torch.Tensor:
    """The last TAPS inputs of a convolution, as peers keep them."""
    return torch.randn(batch, CHANNELS, TAPS, device="cuda", dtype=DTYPE)


def ours_inputs(before: torch.Tensor) -> torch.Tensor:
    """Ours keeps one less."""
    return before[:, :, 1:].float().contiguous()


def conv_call(batch: int, length: int) -> Call:
    x = torch.randn(batch * length, CHANNELS, device="cuda", dtype=DTYPE)
    taps, before = torch.randn(CHANNELS, TAPS, device="cuda", dtype=DTYPE), last_inputs(batch)
    weight, state, rows, out = taps.float(), ours_inputs(before), rows_of(batch, length), torch.empty_like(x)
    batched = x.view(batch, length, CHANNELS)
    theirs = {name: Held(partial(peer.conv, batched, taps, before.clone())) for name, peer in present().items()}

    def ours() -> None:
        causal_conv(x, weight, None, state, rows, out, silu=True)

    ours()
    for name, call in theirs.items():
        call()
        result, after = call.results
        check(f"causal_conv {batch}x{length}, {name}", CLOSE, (out, result.flatten(0, 1)), (state, after[:, :, 1:]))
    return Call(ours, 2 * x.nbytes + 2 * state.nbytes + weight.nbytes, theirs)


def norm_call(tokens: int) -> Call:
    x, gate = torch.randn(2, tokens, HEADS * VALUE_DIM, device="cuda", dtype=DTYPE)
    weight, out = torch.rand(VALUE_DIM, device="cuda"), torch.empty_like(x)
    theirs = {name: Held(partial(peer.norm, x, gate, weight, EPS)) for name, peer in present().items()}

    def ours() -> None:
        gated_norm(x, gate, weight, EPS, out)

    ours()
    for name, call in theirs.items():
        call()
        check(f"gated_norm {tokens}, {name}", CLOSE, (out, call.results))
    return Call(ours, 3 * x.nbytes, theirs)


def replayed_us(runs: list[Callable[[], None]]) -> float:
    graph = graph_of(runs)
    return median(replay_us(graph) / len(runs) for _ in range(REPLAYS))


def measure(make: Callable[[], Call]) -> tuple[float, dict[str, float] | None, int]:
    """Median microseconds of one call, ours and each peer's (None: not asked for), and its bytes."""
    first = make()
    num_sets = max(1, min(MAX_SETS, ROTATED_BYTES // first.num_bytes))
    calls = [first, *(make() for _ in range(num_sets - 1))]
    ours = replayed_us([call.ours for call in calls])
    if first.theirs is None:
        return ours, None, first.num_bytes
    theirs = {name: replayed_us([call.theirs[name] for call in calls]) for name in first.theirs}
    return ours, theirs, first.num_bytes


def column(peer: str, ours: float, theirs: dict[str, float] | None) -> str:
    """A peer's microseconds and ratio, or why there are none: the library or such a function of it is missing."""
    if theirs is None:
        return f"{'':19}"
    if peer not in theirs:
        return f"{'absent' if PEERS[peer] is None else 'none':>11}{'':8}"
    return f"{theirs[peer]:11.1f}{theirs[peer] / ours:8.1f}"


def report(name: str, shape: str, make: Callable[[], Call]) -> float:
    ours, theirs, moved = measure(make)
    rate = moved / ours / 1000
    columns = "".join(column(peer, ours, theirs) for peer in PEERS)
    print(f"{name:<24}{shape:>8}{ours:10.2f}{rate:8.0f}{rate / PEAK_GBPS:7.0%}{columns}".rstrip(), flush=True)
    torch.cuda.empty_cache()
    return ours


def report_decode() -> None:
    for batch in BATCHES:
        report("decode", f"{batch}x1", lambda batch=batch: delta_call(batch, 1))


def report_layer() -> None:
    for batch in (64, 16, 1):
        report("decode, whole layer", f"{batch}x1", lambda batch=batch: layer_call(batch))


def report_verify() -> None:
    """Peers token by token, every state kept, and all tokens in one call, which keeps only the last."""
    for batch in (8, 1):
        for name, keeps in (("verify", True), ("verify, peer keeps 1", False)):
            report(name, f"{batch}x5", lambda b=batch, keeps=keeps: delta_call(b, 5, verified=True, peer_keeps=keeps))


def report_prompts() -> None:
    for batch, length in PROMPTS:
        shape, workspace = f"{batch}x{length}", workspace_of(batch, length)
        report("prompt by chunks", shape, lambda b=batch, n=length, w=workspace: delta_call(b, n, workspace=w))
        report("prompt by token", shape, lambda b=batch, n=length: delta_call(b, n, with_peer=False))


def report_conv() -> None:
    for batch, length in ((64, 1), (1, 1), (1, 2048)):
        report("causal_conv", f"{batch}x{length}", lambda b=batch, n=length: conv_call(b, n))


def report_norm() -> None:
    for tokens in (2048, 64, 1):
        report("gated_norm", f"{tokens}", lambda n=tokens: norm_call(n))


PARTS = {
    "decode": report_decode,
    "layer": report_layer,
    "verify": report_verify,
    "prompt": report_prompts,
    "conv": report_conv,
    "norm": report_norm,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, action="append", help="may be given several times; all of them")
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {DTYPE}, median of {REPLAYS} graph replays")
    whose = ", ".join(f"{name}: {'absent' if peer is None else peer.rule_name}" for name, peer in PEERS.items())
    print(f"{HEADS} heads of {KEY_DIM} x {VALUE_DIM}, keys of {KEY_HEADS}; {whose}")
    columns = "".join(f"{name + ' us':>11}{'ratio':>8}" for name in PEERS)
    print(f"{'':<24}{'rows':>8}{'us':>10}{'GB/s':>8}{'peak':>7}{columns}")
    for part in options.part or PARTS:
        PARTS[part]()


if __name__ == "__main__":
    main()
