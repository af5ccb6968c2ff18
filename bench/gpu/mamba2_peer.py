"""The Mamba-2 scan of others, to compare with: mamba_ssm's Triton kernels, and torch operators.

Every function takes a layer of the benchmark and returns outputs (T, H, P) and the states after (batch, H, P, N).
Strided x, B and C are what mamba_ssm's kernels take, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from bench_mamba2 import Layer

BF16 = torch.bfloat16
CHUNK = 256  # mamba_ssm's own choice
Run = Callable[["Layer"], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Peer:
    """decode: a token of every sequence.  verify: some tokens, the states kept.  prompt: one sequence by chunks."""

    decode: Run
    verify: Run
    prompt: Run


def peers() -> dict[str, Peer | None]:
    """Both peers by the heading of their column; None: the library cannot be imported."""
    return {"mamba_ssm": mamba_ssm_peer(), "torch": Peer(torch_step, kept_by(torch_step), torch_chunks)}


def mamba_ssm_peer() -> Peer | None:
    try:
        from mamba_ssm.ops.triton import selective_state_update, ssd_combined  # noqa: F401
    except ImportError:
        return None
    return Peer(mamba_ssm_step, kept_by(mamba_ssm_step), mamba_ssm_chunks)


def mamba_ssm_step(layer: Layer) -> tuple[torch.Tensor, torch.Tensor]:
    """Expanded, not copied: a stride of 0 tells the kernel that a head has one dt and one rate."""
    from mamba_ssm.ops.triton.selective_state_update import selective_state_update

    a, shape = layer.arguments, layer.shape
    wide = (shape.heads, shape.head_dim)
    out = selective_state_update(
        a["state"],
        a["x"],
        a["dt"][..., None].expand(-1, *wide),
        a["a"][:, None, None].expand(*wide, shape.state_dim),
        a["b"],
        a["c"],
        a["d"][:, None].expand(wide),
        dt_bias=layer.no_bias[:, None].expand(wide),
    )
    return out, a["state"]


def mamba_ssm_chunks(layer: Layer) -> tuple[torch.Tensor, torch.Tensor]:
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    a = layer.arguments
    x, dt, b, c = (a[name][None] for name in ("x", "dt", "b", "c"))
    out, state = mamba_chunk_scan_combined(
        x, dt, a["a"], b, c, chunk_size=CHUNK, D=a["d"], initial_states=a["state"], return_final_states=True
    )
    return out[0], state


def kept_by(step: Run) -> Run:
    """Token after token, the state copied away after each: neither peer has a kernel that keeps it."""

    def run(layer: Layer) -> tuple[torch.Tensor, torch.Tensor]:
        outs = []
        for token, part in enumerate(tokens_of(layer)):
            outs.append(step(part)[0])
            layer.arguments["checkpoint"][token :: layer.length].copy_(part.arguments["state"])
        return torch.stack(outs, dim=1).flatten(0, 1), layer.arguments["state"]

    return run


def tokens_of(layer: Layer) -> Iterator[Layer]:
    for token in range(layer.length):
        part = copy(layer)
        part.length = 1
        rows = {name: layer.arguments[name][token :: layer.length] for name in ("x", "dt", "b", "c")}
        part.arguments = layer.arguments | rows
        yield part


def torch_step(layer: Layer) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of every sequence, as transformers' torch path takes it."""
    a = layer.arguments
    group = layer.shape.heads // layer.shape.groups
    b, c = (a[name].float().repeat_interleave(group, dim=1) for name in ("b", "c"))
    state, x = a["state"], a["x"].float()
    added = (a["dt"][..., None] * x)[..., None] * b[:, :, None, :]
    state.copy_(state * torch.exp(a["dt"] * a["a"])[..., None, None] + added)
    return (torch.matmul(state, c[..., None]).squeeze(-1) + a["d"][:, None] * x).to(BF16), state


def torch_chunks(layer: Layer) -> tuple[torch.Tensor, torch.Tensor]:
    """A prompt of one sequence chunk by chunk: products of a chunk at once in BF16, the states one after the other."""
    a, shape = layer.arguments, layer.shape
    size = min(CHUNK, layer.length)
    chunks, group = layer.length // size, shape.heads // shape.groups
    x = a["x"].view(chunks, size, shape.heads, shape.head_dim).transpose(1, 2)
    b, c = (
        a[name].view(chunks, size, shape.groups, shape.state_dim).transpose(1, 2).repeat_interleave(group, dim=1)
        for name in ("b", "c")
    )
    dt = a["dt"].view(chunks, size, shape.heads).transpose(1, 2)
    sums = (dt * a["a"][:, None]).cumsum(-1)
    decays = torch.exp((sums[..., :, None] - sums[..., None, :]).masked_fill_(_later(size), -torch.inf))
    weights = ((c @ b.transpose(-1, -2)) * decays * dt[..., None, :]).to(BF16)
    kept = ((torch.exp(sums[..., -1:] - sums) * dt)[..., None] * x).to(BF16)
    added = (kept.transpose(-1, -2) @ b).float()
    state, starts = a["state"][0], []
    for chunk in range(chunks):
        starts.append(state.to(BF16))
        state = state * torch.exp(sums[chunk, :, -1])[:, None, None] + added[chunk]
    before = torch.exp(sums)[..., None] * (c @ torch.stack(starts).transpose(-1, -2))
    out = (weights @ x) + before + a["d"][:, None, None] * x
    return out.transpose(1, 2).reshape(layer.length, shape.heads, shape.head_dim).to(BF16), state[None]


def _later(size: int) -> torch.Tensor:
    return torch.ones(size, size, dtype=torch.bool, device="cuda").triu(1)
