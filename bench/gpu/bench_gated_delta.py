"""Layers of a gated delta net on CUDA: microseconds a call, GB/s and the ratio to what others do.

Decode and verification are held against the bytes of the state, which is read and written once (and written once more
a verified token); prompts against our own token-by-token form as well.  Calls are replayed from CUDA graphs over
states that together exceed the L2 cache.  Run by hand: `python bench/gpu/bench_gated_delta.py`; every case is checked
against its peer first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from bench_elementwise import graph_of, replay_us
from delta_peer import peers
from torch.nn import functional

from edgellm.kernels.cu.causal_conv import causal_conv
from edgellm.kernels.cu.gated_delta import gated_delta, gated_delta_workspace
from edgellm.kernels.cu.gated_norm import gated_norm
from edgellm.kernels.cu.gates import delta_gates
from edgellm.kernels.cu.state_rows import StateRows
from edgellm.kernels.ref.gated_norm import gated_norm as torch_norm

DTYPE = torch.bfloat16
KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM = 16, 32, 128, 128  # Qwen3-Next and the larger Qwen3.5
CHANNELS, TAPS = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM, 4
BATCHES = (1, 4, 16, 64)
PROMPTS = ((1, 512), (1, 2048), (1, 8192), (8, 512))
PEAK_GBPS = 4548  # what a copy reaches on one H200
ROTATED_BYTES = 320 << 20
MAX_SETS = 24
REPLAYS = 12
WHOSE, PEER_CHUNKS, PEER_TOKENS = peers()


@dataclass(slots=True)
class Call:
    """One set of buffers: our call, others' (None: none), and the bytes that must move."""

    ours: Callable[[], None]
    theirs: Callable[[], None] | None
    num_bytes: int


def rows_of(batch: int, length: int, *, verified: bool = False) -> StateRows:
    starts = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * length
    slots = torch.arange(batch, device="cuda", dtype=torch.int32)
    return StateRows(starts, slots, starts[:-1].clone() if verified else None)


def delta_inputs(batch: int, length: int) -> dict[str, torch.Tensor]:
    tokens = batch * length
    mixed = torch.randn(tokens, CHANNELS, device="cuda", dtype=DTYPE)
    q, k, v = mixed.split((KEY_HEADS * KEY_DIM, KEY_HEADS * KEY_DIM, HEADS * VALUE_DIM), dim=1)
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


def delta_call(
    batch: int, length: int, *, verified: bool = False, workspace: torch.Tensor | None = None, with_peer: bool = True
) -> Call:
    inputs = delta_inputs(batch, length)
    state = torch.randn(batch, HEADS, KEY_DIM, VALUE_DIM, device="cuda") * 0.1
    kept = torch.empty(batch * length, *state.shape[1:], device="cuda") if verified else None
    out = torch.empty_like(inputs["v"], memory_format=torch.contiguous_format)
    rows = rows_of(batch, length, verified=verified)
    rule = PEER_TOKENS if length < 64 else PEER_CHUNKS
    batched = [value.unflatten(0, (batch, length)) for value in inputs.values()]
    their_state, their_out = state.clone(), torch.empty_like(out)

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

    def theirs() -> None:
        result, after = rule(*batched, their_state)
        their_out.copy_(result.flatten(0, 1))
        their_state.copy_(after)

    if with_peer:
        ours()
        theirs()
        for actual, expected in ((out.float(), their_out.float()), (state, their_state)):
            error = float((actual - expected).norm() / expected.norm())
            if not error < 1e-2:
                raise SystemExit(f"batch {batch}, {length} tokens: {error:.1%} off {WHOSE}")
    moved = sum(value.numel() * value.element_size() for value in (*inputs.values(), out))
    moved += 2 * state.nbytes + (0 if kept is None else kept.nbytes)
    return Call(ours, theirs if with_peer else None, moved)


def layer_call(batch: int) -> Call:
    """All of a delta net in a decode step but its two linear layers, and without a peer."""
    x, gate = (torch.randn(batch, width, device="cuda", dtype=DTYPE) for width in (CHANNELS, HEADS * VALUE_DIM))
    a, b, decay, beta = torch.randn(4, batch, HEADS, device="cuda")
    rate, norm = -torch.rand(HEADS, device="cuda"), torch.rand(VALUE_DIM, device="cuda")
    weight, state = torch.randn(CHANNELS, TAPS, device="cuda"), torch.zeros(batch, CHANNELS, TAPS - 1, device="cuda")
    memory = torch.randn(batch, HEADS, KEY_DIM, VALUE_DIM, device="cuda") * 0.1
    mixed, recalled, rows = torch.empty_like(x), torch.empty_like(gate), rows_of(batch, 1)
    q, k, v = mixed.split((KEY_HEADS * KEY_DIM, KEY_HEADS * KEY_DIM, HEADS * VALUE_DIM), dim=1)
    heads = [q.view(-1, KEY_HEADS, KEY_DIM), k.view(-1, KEY_HEADS, KEY_DIM), v.view(-1, HEADS, VALUE_DIM)]

    def ours() -> None:
        causal_conv(x, weight, None, state, rows, mixed, silu=True)
        delta_gates(a, b, rate, rate, decay, beta)
        out = recalled.view(-1, HEADS, VALUE_DIM)
        gated_delta(*heads, decay, beta, memory, rows, out, scale=KEY_DIM**-0.5, l2norm=True)
        gated_norm(recalled, gate, norm, 1e-6, recalled)

    return Call(ours, None, 2 * (memory.nbytes + state.nbytes) + 4 * x.nbytes)


def conv_call(batch: int, length: int) -> Call:
    x = torch.randn(batch * length, CHANNELS, device="cuda", dtype=DTYPE)
    weight = torch.randn(CHANNELS, TAPS, device="cuda")
    state = torch.zeros(batch, CHANNELS, TAPS - 1, device="cuda")
    their_state, out, their_out = state.to(DTYPE), torch.empty_like(x), torch.empty_like(x)
    rows, narrow = rows_of(batch, length), weight.to(DTYPE)[:, None]

    def theirs() -> None:
        joined = torch.cat((their_state, x.view(batch, length, CHANNELS).transpose(1, 2)), dim=2)
        their_state.copy_(joined[:, :, 1 - TAPS :])
        result = functional.silu(functional.conv1d(joined, narrow, groups=CHANNELS))
        their_out.copy_(result.transpose(1, 2).reshape(-1, CHANNELS))

    def ours() -> None:
        causal_conv(x, weight, None, state, rows, out, silu=True)

    ours()
    theirs()
    torch.testing.assert_close(out, their_out, rtol=5e-2, atol=5e-2)
    return Call(ours, theirs, 2 * x.nbytes + 2 * state.nbytes + weight.nbytes)


def norm_call(tokens: int) -> Call:
    x, gate = torch.randn(2, tokens, HEADS * VALUE_DIM, device="cuda", dtype=DTYPE)
    weight, out, their_out = torch.rand(VALUE_DIM, device="cuda"), torch.empty_like(x), torch.empty_like(x)

    def ours() -> None:
        gated_norm(x, gate, weight, 1e-6, out)

    def theirs() -> None:
        torch_norm(x, gate, weight, 1e-6, their_out)

    ours()
    theirs()
    torch.testing.assert_close(out, their_out, rtol=2e-2, atol=2e-2)
    return Call(ours, theirs, 3 * x.nbytes)


def measure(make: Callable[[], Call]) -> tuple[float, float | None, int]:
    """Median microseconds of one call, ours and theirs, and its bytes."""
    first = make()
    num_sets = max(1, min(MAX_SETS, ROTATED_BYTES // first.num_bytes))
    calls = [first, *(make() for _ in range(num_sets - 1))]
    sides = [[call.ours for call in calls]]
    if first.theirs is not None:
        sides.append([call.theirs for call in calls])
    times = []
    for side in sides:
        graph = graph_of(side)
        times.append(median(replay_us(graph) / num_sets for _ in range(REPLAYS)))
    return times[0], times[1] if len(times) > 1 else None, first.num_bytes


def report(name: str, shape: str, make: Callable[[], Call]) -> float:
    ours, theirs, moved = measure(make)
    rate = moved / ours / 1000
    peer = "" if theirs is None else f"{theirs:11.1f}{theirs / ours:8.1f}"
    print(f"{name:<22}{shape:>10}{ours:10.2f}{rate:8.0f}{rate / PEAK_GBPS:7.0%}{peer}", flush=True)
    torch.cuda.empty_cache()
    return ours


def main() -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {DTYPE}, median of {REPLAYS} graph replays")
    print(f"{HEADS} heads of {KEY_DIM} x {VALUE_DIM}, keys of {KEY_HEADS}; peer: {WHOSE}")
    print(f"{'':<22}{'rows':>10}{'us':>10}{'GB/s':>8}{'peak':>7}{'peer us':>11}{'ratio':>8}")
    for batch in BATCHES:
        report("decode", f"{batch}x1", lambda batch=batch: delta_call(batch, 1))
    for batch in (1, 16, 64):
        report("decode, whole layer", f"{batch}x1", lambda batch=batch: layer_call(batch))
    for batch in (1, 8):
        report("verify", f"{batch}x5", lambda batch=batch: delta_call(batch, 5, verified=True))
    for batch, length in PROMPTS:
        shape, workspace = f"{batch}x{length}", workspace_of(batch, length)
        report("prompt by chunks", shape, lambda b=batch, n=length, w=workspace: delta_call(b, n, workspace=w))
        report("prompt by token", shape, lambda b=batch, n=length: delta_call(b, n, with_peer=False))
    for batch, length in ((1, 1), (64, 1), (1, 2048)):
        report("causal_conv", f"{batch}x{length}", lambda b=batch, n=length: conv_call(b, n))
    for tokens in (1, 64, 2048):
        report("gated_norm", f"{tokens}", lambda n=tokens: norm_call(n))


if __name__ == "__main__":
    main()
