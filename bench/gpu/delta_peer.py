"""Gated delta nets of others, to compare with: flash-linear-attention's Triton kernels, and torch operators.

Every function gets tensors as its library wants them: sequences of equal length, contiguous, states in the order of
the batch.  What it returns is new memory, the state after included; no copy into our buffers is part of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch.nn import functional

from edgellm.kernels.ref.gated_norm import gated_norm

CHUNK = 64
Pair = tuple[torch.Tensor, torch.Tensor]
Rule = Callable[..., Pair]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Of one delta net but its linear layers: H heads of dv, convolutions of W taps for q, k and v.

    Attributes:
        taps: (channels, W) of q, k and v, bfloat16.
        log_rate: (H,) float32; decay = -exp(log_rate) * softplus(a + bias).
        bias: (H,) float32.
        norm: (dv,) float32.
        eps: of the norm.
    """

    taps: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    log_rate: torch.Tensor
    bias: torch.Tensor
    norm: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Peer:
    """What one library has for each of our kernels.

    Attributes:
        rule_name: whose gated delta rule it is.
        tokens, chunks: the rule token by token and by chunks: q, k (B, T, Hk, dk), v (B, T, Hv, dv), decay, beta
            (B, T, Hv) and the state (B, Hv, dk, dv) to outputs and the state after; q and k are brought to unit length
            and q is scaled by dk ** -0.5.
        conv: x (B, T, C), taps (C, W), the last W inputs (B, C, W) to silu of the outputs and the last W inputs.
        norm: x, gate (T, H * D), weight (D,), eps to the gated norm.
        layer: a step of `LayerWeights`, see `fla_layer`; None: it has none.
    """

    rule_name: str
    tokens: Rule
    chunks: Rule
    conv: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Pair]
    norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
    layer: Callable[..., Pair] | None = None


def peers() -> dict[str, Peer | None]:
    """Both peers by the heading of their column; None: the library cannot be imported."""
    return {"fla": fla_peer(), "torch": torch_peer()}


def fla_peer() -> Peer | None:
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
    except ImportError:
        return None
    return Peer(
        "flash-linear-attention",
        _with_state(fused_recurrent_gated_delta_rule),
        _with_state(chunk_gated_delta_rule),
        fla_conv,
        fla_norm,
        fla_layer,
    )


def torch_peer() -> Peer:
    name, tokens, chunks = "plain torch", torch_tokens, torch_chunks
    try:
        from transformers.models.qwen3_next import modeling_qwen3_next as model
    except ImportError:
        return Peer(name, tokens, chunks, torch_conv, torch_norm)
    found = [_torch_part(model, f"torch_{kind}_gated_delta_rule") for kind in ("recurrent", "chunk")]
    if None not in found:
        name, (tokens, chunks) = "transformers", (_with_state(_repeated(rule)) for rule in found)
    return Peer(name, tokens, chunks, torch_conv, torch_norm)


def _torch_part(model: ModuleType, name: str) -> Rule | None:
    """The function of that name as written: transformers replaces it by fla's where fla is installed."""
    function = inspect.unwrap(getattr(model, name, None) or len)
    code = getattr(function, "__code__", None)
    return function if code is not None and code.co_filename == model.__file__ else None


def _repeated(rule: Rule) -> Rule:
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **rest: object) -> Pair:
        group = v.shape[2] // k.shape[2]
        return rule(q.repeat_interleave(group, dim=2), k.repeat_interleave(group, dim=2), v, **rest)

    return call


def _with_state(rule: Rule) -> Rule:
    def call(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
    ) -> Pair:
        return rule(
            q, k, v, g=decay, beta=beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
        )

    return call


def fla_conv(x: torch.Tensor, taps: torch.Tensor, state: torch.Tensor) -> Pair:
    """A single token goes to the kernel for it, which writes the state in place."""
    from fla.modules.causal_conv1d import causal_conv1d, causal_conv1d_update

    if x.shape[1] == 1:
        return causal_conv1d_update(x, state, weight=taps, activation="silu")
    return causal_conv1d(x, taps, initial_state=state, output_final_state=True, activation="silu")


def fla_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    from fla.modules.norm.fused_norm_gate import rms_norm_gated

    heads = (-1, weight.numel())
    return rms_norm_gated(x.view(heads), gate.view(heads), weight, None, "swish", eps=eps).view(x.shape)


def fla_layer(
    mixed: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    gate: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    weights: LayerWeights,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    state: torch.Tensor,
) -> Pair:
    """One token a sequence as fla's GatedDeltaNet takes it: three convolutions, the gates in the rule's kernel.

    Args:
        mixed: q, k (B, 1, Hk * dk) and v (B, 1, Hv * dv) before their convolutions.
        gate: (B, Hv * dv) of the norm.
        a, b: (B, 1, Hv).
        inputs: of the convolutions, the last W each; written.
        state: (B, Hv, dk, dv).
    """
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    heads = (state.shape[2], state.shape[2], state.shape[3])
    q, k, v = (
        fla_conv(x, taps, last)[0].unflatten(2, (-1, size))
        for x, taps, last, size in zip(mixed, weights.taps, inputs, heads, strict=True)
    )
    out, after = fused_recurrent_gated_delta_rule(
        q,
        k,
        v,
        g=a,
        beta=b,
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        A_log=weights.log_rate,
        dt_bias=weights.bias,
    )
    return fla_norm(out.flatten(1), gate, weights.norm, weights.eps), after


def torch_conv(x: torch.Tensor, taps: torch.Tensor, state: torch.Tensor) -> Pair:
    joined = torch.cat((state, x.transpose(1, 2)), dim=2)
    out = functional.silu(functional.conv1d(joined[:, :, 1:], taps[:, None], groups=len(taps)))
    return out.transpose(1, 2).contiguous(), joined[:, :, -taps.shape[1] :].contiguous()


def torch_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    out = torch.empty_like(x)
    gated_norm(x, gate, weight, eps, out)
    return out


def _unit_heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> list[torch.Tensor]:
    """Everything in float32 as (B, Hv, T, ...), q and k of unit length."""
    group = v.shape[2] // k.shape[2]
    rows = [torch.nn.functional.normalize(part.float(), dim=-1).repeat_interleave(group, 2) for part in (q, k)]
    return [part.float().transpose(1, 2) for part in (*rows, v, decay, beta)]


def torch_tokens(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> Pair:
    """One token after the other."""
    query, key, value, decays, betas = _unit_heads(q, k, v, decay, beta)
    out = torch.empty_like(value)
    for t in range(value.shape[2]):
        state = state * decays[:, :, t, None, None].exp()
        error = value[:, :, t] - (key[:, :, t, None] @ state).squeeze(2)
        state = state + key[:, :, t, :, None] * (error * betas[:, :, t, None])[:, :, None]
        out[:, :, t] = (query[:, :, t, None] @ state).squeeze(2)
    return (out * k.shape[-1] ** -0.5).transpose(1, 2).to(v.dtype), state


def torch_chunks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> Pair:
    """A chunk after the other, each one triangular system (Yang et al. 2024); T is a multiple of CHUNK."""
    parts = [part.unflatten(2, (-1, CHUNK)) for part in _unit_heads(q, k, v, decay, beta)]
    query, key, value, decays, betas = parts
    totals = decays.cumsum(-1)
    between = (totals[..., :, None] - totals[..., None, :]).tril().exp().tril()
    system = (key * betas[..., None]) @ key.transpose(-1, -2) * between
    right = torch.cat((value * betas[..., None], key * (betas * totals.exp())[..., None]), dim=-1)
    solved = torch.linalg.solve_triangular(system.tril(-1), right, upper=False, unitriangular=True)
    updates, reads = solved.split((value.shape[-1], key.shape[-1]), dim=-1)
    scores = query @ key.transpose(-1, -2) * between
    asked, left = query * totals.exp()[..., None], key * (totals[..., -1:] - totals).exp()[..., None]
    out = torch.empty_like(value)
    for c in range(value.shape[2]):
        new = updates[:, :, c] - reads[:, :, c] @ state
        out[:, :, c] = asked[:, :, c] @ state + scores[:, :, c] @ new
        state = state * totals[:, :, c, -1, None, None].exp() + left[:, :, c].transpose(-1, -2) @ new
    return (out * k.shape[-1] ** -0.5).flatten(2, 3).transpose(1, 2).to(v.dtype), state
