"""The CPU kernels of recurrent layers against the torch functions of transformers, on the same inputs."""

from __future__ import annotations

import pytest
import torch
from recurrent_cases import ConvCase, DeltaCase, MambaCase, ragged_rows
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_next import modeling_qwen3_next

from edgellm.kernels.cpu.causal_conv import causal_conv
from edgellm.kernels.cpu.gated_delta import gated_delta
from edgellm.kernels.cpu.mamba2 import mamba2
from edgellm.kernels.cpu.recurrent_rows import RecurrentRows

BATCH = 3


def equal_rows(num_tokens: int) -> RecurrentRows:
    """BATCH sequences of this many tokens, each in the slot of its place in the batch."""
    return ragged_rows([num_tokens] * BATCH, seed=0, slots=range(BATCH))


def batched(rows: torch.Tensor) -> torch.Tensor:
    """(BATCH * n, ...) as (BATCH, n, ...)."""
    return rows.unflatten(0, (BATCH, -1))


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(actual.float(), expected.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("num_tokens", [1, 4, 9])
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_convolution_equals_the_update_of_transformers(num_tokens: int, with_bias: bool) -> None:
    """Theirs keeps four inputs, of which the oldest no longer counts; ours the three that do."""
    case = ConvCase(channels=70, width=4, with_bias=with_bias)
    inputs = case.inputs(BATCH * num_tokens, torch.float32, seed=1)
    theirs = torch.randn(BATCH, 70, 4)
    ours = theirs[:, :, 1:].clone()
    out = torch.empty_like(inputs["x"])
    causal_conv(**inputs, state=ours, rows=equal_rows(num_tokens), out=out, silu=True)
    expected = modeling_qwen3_next.causal_conv1d_update(
        batched(inputs["x"]).mT, theirs, inputs["weight"], inputs["bias"], "silu"
    )
    close(batched(out), expected.mT, 1e-5)
    assert torch.equal(ours, theirs[:, :, 1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["recurrent", "chunk"])
@pytest.mark.parametrize("num_tokens", [1, 5, 150])
def test_the_delta_rule_equals_that_of_transformers(num_tokens: int, form: str, dtype: torch.dtype) -> None:
    case = DeltaCase(key_heads=2, heads=4, key_dim=32, value_dim=48)
    inputs = case.inputs(BATCH * num_tokens, dtype, seed=1)
    state = case.state(BATCH, seed=2)
    before = state.clone()
    out = torch.empty(BATCH * num_tokens, 4, 48)
    gated_delta(**inputs, state=state, rows=equal_rows(num_tokens), out=out, scale=32**-0.5, l2norm=True)
    rule = getattr(modeling_qwen3_next, f"torch_{form}_gated_delta_rule")
    wide = {name: batched(value.float()) for name, value in inputs.items()}
    expected, expected_state = rule(
        wide["q"],
        wide["k"],
        wide["v"],
        g=wide["decay"],
        beta=wide["beta"],
        initial_state=before,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    close(batched(out), expected)
    close(state, expected_state)


@pytest.mark.parametrize("num_tokens", [1, 5, 150])
def test_the_scan_equals_that_of_transformers(num_tokens: int) -> None:
    """Their scan by chunks from a state of zeros, then one more token by their update."""
    case = MambaCase(groups=2, heads=6, head_dim=20, state_dim=32)
    inputs = case.inputs(BATCH * num_tokens, torch.float32, seed=1)
    state = torch.zeros(BATCH, *case.state_shape)
    out = torch.empty_like(inputs["x"])
    mamba2(**inputs, state=state, rows=equal_rows(num_tokens), out=out)
    wide = {name: batched(inputs[name]) for name in case.token_names}
    expected, theirs = modeling_mamba2.mamba2_chunk_scan(
        wide["x"],
        wide["dt"],
        inputs["a"],
        wide["b"],
        wide["c"],
        chunk_size=64,
        D=inputs["d"],
        return_final_states=True,
    )
    close(batched(out), expected)
    close(state, theirs)
    token = case.inputs(BATCH, torch.float32, seed=3)
    token |= {"a": inputs["a"], "d": inputs["d"]}
    result = torch.empty_like(token["x"])
    mamba2(**token, state=state, rows=equal_rows(1), out=result)
    per_head = {"dt": token["dt"][:, :, None].expand(-1, -1, 20), "A": inputs["a"][:, None, None].expand(-1, 20, 32)}
    last = modeling_mamba2.mamba2_selective_state_update(
        theirs,
        token["x"],
        per_head["dt"],
        per_head["A"],
        token["b"],
        token["c"],
        D=inputs["d"][:, None].expand(-1, 20),
    )
    close(result, last)
    close(state, theirs)
