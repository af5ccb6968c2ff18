"""The CPU kernels of recurrent layers against plain torch, in microseconds a call.

    pytest bench/bench_recurrent_kernels.py                        # times; ratios in extra_info
    pytest bench/bench_recurrent_kernels.py --benchmark-disable    # smoke test: equal results

`prefill` is one sequence of 512 tokens, `decode` eight of one token; sizes are those of Qwen3-Next (convolution and
delta rule) and of Granite 4.0-H (scan).  Peer of a prefill: the form of transformers that works by chunks, which is
what torch users run; of a decode: its form for one token.  For the convolution: `conv1d` over the rows with their past
in front.  The peer's round is the `setup` of ours, so the rounds alternate.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch
from recurrent_cases import ConvCase, DeltaCase, MambaCase, RecurrentCase, ragged_rows
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_next import modeling_qwen3_next

from bench.comparison import alternate, timed
from edgellm.kernels.cpu import _ops
from edgellm.kernels.cpu.causal_conv import causal_conv
from edgellm.kernels.cpu.gated_delta import gated_delta
from edgellm.kernels.cpu.mamba2 import mamba2

CASES = {
    "conv": ConvCase(channels=8192, width=4),
    "delta": DeltaCase(key_heads=16, heads=32, key_dim=128, value_dim=128),
    "mamba": MambaCase(groups=1, heads=48, head_dim=64, state_dim=128),
}
LENGTHS = {"prefill": [512], "decode": [1] * 8}
KERNELS: dict[str, Callable[..., None]] = {"conv": causal_conv, "delta": gated_delta, "mamba": mamba2}
ROUNDS = 9
LOWEST_RATIO = 1.0


def torch_conv(inputs: dict[str, Any], state: torch.Tensor, batch: int) -> torch.Tensor:
    """(T, C); the state of transformers has one input more, of no effect."""
    x = inputs["x"].unflatten(0, (batch, -1)).mT
    out = modeling_qwen3_next.causal_conv1d_update(x, state, inputs["weight"], None, "silu")
    return out.mT.flatten(0, 1)


def torch_delta(inputs: dict[str, Any], state: torch.Tensor, batch: int) -> torch.Tensor:
    """(T, Hv, dv); the state is not written back, which only helps."""
    wide = {name: value.unflatten(0, (batch, -1)) for name, value in inputs.items()}
    form = "chunk" if wide["v"].shape[1] > 1 else "recurrent"
    rule = getattr(modeling_qwen3_next, f"torch_{form}_gated_delta_rule")
    out, _ = rule(
        wide["q"],
        wide["k"],
        wide["v"],
        g=wide["decay"],
        beta=wide["beta"],
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return out.flatten(0, 1)


def torch_mamba(inputs: dict[str, Any], state: torch.Tensor, batch: int) -> torch.Tensor:
    """(T, H, P); by chunks of 256 or by the update of one token."""
    if batch == inputs["x"].shape[0]:
        head_dim, state_dim = state.shape[-2:]
        return modeling_mamba2.mamba2_selective_state_update(
            state,
            inputs["x"],
            inputs["dt"][:, :, None].expand(-1, -1, head_dim),
            inputs["a"][:, None, None].expand(-1, head_dim, state_dim),
            inputs["b"],
            inputs["c"],
            D=inputs["d"][:, None].expand(-1, head_dim),
        )
    wide = {name: inputs[name].unflatten(0, (batch, -1)) for name in MambaCase.token_names}
    out, _ = modeling_mamba2.mamba2_chunk_scan(
        wide["x"],
        wide["dt"],
        inputs["a"],
        wide["b"],
        wide["c"],
        chunk_size=256,
        D=inputs["d"],
        initial_states=state,
        return_final_states=True,
    )
    return out.flatten(0, 1)


PEERS: dict[str, Callable[..., torch.Tensor]] = {"conv": torch_conv, "delta": torch_delta, "mamba": torch_mamba}


def peer_state(case: RecurrentCase, state: torch.Tensor) -> torch.Tensor:
    """A copy, in the peer's form."""
    return torch.nn.functional.pad(state, (1, 0)) if case.kind == "conv" else state.clone()


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("kind", ["conv", "delta", "mamba"])
def test_kernel_against_torch(benchmark: Any, kind: str, phase: str) -> None:
    case, lengths = CASES[kind], LENGTHS[phase]
    batch = len(lengths)
    rows = ragged_rows(lengths, seed=0, slots=range(batch))
    inputs = case.inputs(rows.num_tokens, torch.float32, seed=1)
    state = case.state(batch, seed=2)
    theirs = peer_state(case, state)
    out = torch.empty_like(inputs[case.value_name])

    def ours() -> None:
        KERNELS[kind](**inputs, **case.options(), state=state, rows=rows, out=out)

    def peer() -> torch.Tensor:
        return PEERS[kind](inputs, theirs, batch)

    with torch.inference_mode():
        expected = peer()
        ours()
        np.testing.assert_allclose(out.numpy(), expected.numpy(), atol=2e-4, rtol=2e-4)
        peer_ns, ours_ns = alternate(benchmark, lambda: timed(peer), lambda: timed(ours), ROUNDS)
    ratio = median(peer_ns) / median(ours_ns)
    benchmark.extra_info.update(
        ratio_to_peer=round(ratio, 2),
        peer_us=round(median(peer_ns) / 1e3, 1),
        ours_us=round(median(ours_ns) / 1e3, 1),
        kernel=case.label,
        tokens=rows.num_tokens,
        sequences=batch,
        dtype="float32",
        isa=_ops.isa_name(),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
    )
    if not benchmark.disabled:
        assert ratio >= LOWEST_RATIO
