"""The CPU kernels of recurrent layers: equal to their references, and bit for bit the same however a step is cut."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from recurrent_cases import ConvCase, DeltaCase, MambaCase, RecurrentCase, ragged_rows

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cpu import _ops
from edgellm.kernels.cpu.causal_conv import causal_conv
from edgellm.kernels.cpu.gated_delta import gated_delta
from edgellm.kernels.cpu.mamba2 import mamba2
from edgellm.kernels.cpu.recurrent_rows import RecurrentRows
from edgellm.kernels.ref import causal_conv as ref_conv
from edgellm.kernels.ref import gated_delta as ref_delta
from edgellm.kernels.ref import mamba2 as ref_mamba

TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 2e-2}
STATE_TOLERANCE = 3e-5
DTYPES = [torch.float32, torch.bfloat16]
KERNELS: dict[str, Callable[..., None]] = {"conv": causal_conv, "delta": gated_delta, "mamba": mamba2}
REFERENCES: dict[str, Callable[..., None]] = {
    "conv": ref_conv.causal_conv,
    "delta": ref_delta.gated_delta,
    "mamba": ref_mamba.mamba2,
}
# Sizes that fill vectors and tiles of every instruction set, and sizes that fill none.
CASES = [
    ConvCase(channels=512, width=4),
    ConvCase(channels=259, width=4, with_bias=True),
    ConvCase(channels=5, width=3, silu=False),
    ConvCase(channels=70, width=2, with_bias=True),
    ConvCase(channels=33, width=8),
    ConvCase(channels=17, width=1, silu=False),
    DeltaCase(key_heads=2, heads=4, key_dim=128, value_dim=128),
    DeltaCase(key_heads=2, heads=2, key_dim=64, value_dim=96),
    DeltaCase(key_heads=1, heads=3, key_dim=17, value_dim=5),
    DeltaCase(key_heads=3, heads=6, key_dim=30, value_dim=37, l2norm=False),
    DeltaCase(key_heads=1, heads=2, key_dim=256, value_dim=33),
    DeltaCase(key_heads=1, heads=1, key_dim=1, value_dim=1),
    DeltaCase(key_heads=1, heads=1, key_dim=20, value_dim=530),
    MambaCase(groups=1, heads=4, head_dim=64, state_dim=128),
    MambaCase(groups=2, heads=6, head_dim=7, state_dim=16),
    MambaCase(groups=3, heads=3, head_dim=5, state_dim=37),
    MambaCase(groups=1, heads=2, head_dim=1, state_dim=1),
    MambaCase(groups=1, heads=2, head_dim=33, state_dim=300),
]
CASE_NAMES = [case.label for case in CASES]
SMALL_CASES = [case for case in CASES if case.is_small]
SMALL_NAMES = [case.label for case in SMALL_CASES]


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), atol=tolerance, rtol=tolerance)


def run_case(
    case: RecurrentCase,
    inputs: dict[str, torch.Tensor],
    state: torch.Tensor,
    rows: RecurrentRows,
    *,
    checkpoint: torch.Tensor | None = None,
) -> torch.Tensor:
    """Output of the kernel; state and checkpoint are written."""
    out = torch.full_like(inputs[case.value_name], 9.0)
    KERNELS[case.kind](**inputs, **case.options(), state=state, rows=rows, out=out, checkpoint=checkpoint)
    return out


def run_reference(
    case: RecurrentCase, inputs: dict[str, torch.Tensor], state: torch.Tensor, rows: RecurrentRows
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, state, checkpoint) in float64."""
    wide = {name: None if value is None else value.double() for name, value in inputs.items()}
    out = torch.zeros_like(wide[case.value_name])
    state = state.double()
    checkpoint = torch.zeros(max(rows.min_checkpoints, 1), *state.shape[1:], dtype=torch.float64)
    REFERENCES[case.kind](**wide, **case.options(), state=state, rows=rows, out=out, checkpoint=checkpoint)
    return out, state, checkpoint


# ---- against the references ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=CASE_NAMES)
def test_ragged_steps_equal_the_reference(case: RecurrentCase, dtype: torch.dtype) -> None:
    """Prompts of several blocks, single tokens, an empty sequence; slots in disorder, some rows with checkpoints."""
    rows = ragged_rows([3, 1, 70, 0, 1, 6, 2], seed=1, verified=(0, 4, 5))
    inputs = case.inputs(rows.num_tokens, dtype, seed=2)
    state = case.state(num_slots=9, seed=3)
    before = state.clone()
    checkpoint = torch.full((rows.min_checkpoints + 1, *state.shape[1:]), 5.0)
    out = run_case(case, inputs, state, rows, checkpoint=checkpoint)
    expected, expected_state, expected_checkpoint = run_reference(case, inputs, before, rows)
    close(out, expected, TOLERANCE[dtype])
    close(state, expected_state, STATE_TOLERANCE)
    close(checkpoint[:-1], expected_checkpoint, STATE_TOLERANCE)
    assert bool((checkpoint[-1] == 5.0).all())
    untouched = sorted(set(range(9)) - {slot for first, end, slot, _ in rows.spans() if end > first})
    assert torch.equal(state[untouched], before[untouched])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", ["conv", "delta", "mamba"])
def test_random_sizes_equal_the_reference(kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    case = {"conv": ConvCase, "delta": DeltaCase, "mamba": MambaCase}[kind].random(rng)
    dtype = DTYPES[seed % 2]
    lengths = rng.integers(0, 50, rng.integers(1, 6)).tolist()
    rows = ragged_rows(lengths, seed=seed, verified=tuple(range(0, len(lengths), 2)))
    inputs = case.inputs(rows.num_tokens, dtype, seed=seed)
    state = case.state(num_slots=9, seed=seed)
    checkpoint = torch.zeros(max(rows.min_checkpoints, 1), *state.shape[1:])
    expected, expected_state, expected_checkpoint = run_reference(case, inputs, state, rows)
    out = run_case(case, inputs, state, rows, checkpoint=checkpoint)
    close(out, expected, TOLERANCE[dtype])
    close(state, expected_state, STATE_TOLERANCE)
    close(checkpoint, expected_checkpoint, STATE_TOLERANCE)


@pytest.mark.parametrize("case", SMALL_CASES, ids=SMALL_NAMES)
def test_a_long_sequence_stays_near_the_reference(case: RecurrentCase) -> None:
    """Rounding does not add up over 600 tokens."""
    rows = ragged_rows([600], seed=1)
    inputs = case.inputs(600, torch.float32, seed=2)
    state = case.state(num_slots=9, seed=3)
    expected, expected_state, _ = run_reference(case, inputs, state, rows)
    close(run_case(case, inputs, state, rows), expected, 1e-4)
    close(state, expected_state, 1e-4)


@pytest.mark.parametrize("case", CASES, ids=CASE_NAMES)
def test_rows_and_states_may_lie_apart(case: RecurrentCase) -> None:
    """Columns of wider matrices, states inside larger records: the same bits, and nothing beside them is written."""
    rows = ragged_rows([5, 1, 33], seed=4, verified=(0,))
    inputs = case.inputs(rows.num_tokens, torch.float32, seed=5)
    state = case.state(num_slots=9, seed=6)
    checkpoint = torch.zeros(rows.min_checkpoints, *state.shape[1:])
    apart = {name: case.spread(name, value) for name, value in inputs.items()}
    records = torch.full((9, state[0].numel() + 3), 8.0)
    wide_state = records[:, 1:-2].view(9, *state.shape[1:])
    wide_state.copy_(state)
    wide_checkpoint = torch.full((rows.min_checkpoints, state[0].numel() + 5), 8.0)
    kept = wide_checkpoint[:, 5:].view(rows.min_checkpoints, *state.shape[1:])
    out = run_case(case, inputs, state, rows, checkpoint=checkpoint)
    matrix = torch.full((rows.num_tokens, out[0].numel() + 4), 8.0)
    wide_out = matrix[:, 2:-2].view(out.shape)
    KERNELS[case.kind](**apart, **case.options(), state=wide_state, rows=rows, out=wide_out, checkpoint=kept)
    assert torch.equal(wide_out, out)
    assert torch.equal(wide_state, state)
    assert torch.equal(kept, checkpoint)
    assert bool((matrix[:, :2] == 8.0).all())
    assert bool((matrix[:, -2:] == 8.0).all())
    assert bool((records[:, :1] == 8.0).all())
    assert bool((records[:, -2:] == 8.0).all())
    assert bool((wide_checkpoint[:, :5] == 8.0).all())


@pytest.mark.parametrize("case", [CASES[0], CASES[6], CASES[13]], ids=["conv", "delta", "mamba"])
def test_float32_results_of_bfloat16_rows(case: RecurrentCase) -> None:
    """The output's dtype is its own: rounding it gives what a bfloat16 output holds."""
    rows = ragged_rows([4, 1], seed=1)
    inputs = case.inputs(rows.num_tokens, torch.bfloat16, seed=2)
    narrow = run_case(case, inputs, case.state(9, seed=3), rows)
    wide = torch.empty(narrow.shape)
    KERNELS[case.kind](**inputs, **case.options(), state=case.state(9, seed=3), rows=rows, out=wide)
    assert torch.equal(wide.to(torch.bfloat16), narrow)


@pytest.mark.parametrize("case", [CASES[1], CASES[14]], ids=["conv", "mamba"])
def test_the_output_may_be_the_input(case: RecurrentCase) -> None:
    rows = ragged_rows([40, 1, 2], seed=1)
    inputs = case.inputs(rows.num_tokens, torch.float32, seed=2)
    expected = run_case(case, inputs, case.state(9, seed=3), rows)
    inputs = {name: None if value is None else value.clone() for name, value in inputs.items()}
    target = inputs[case.value_name]
    KERNELS[case.kind](**inputs, **case.options(), state=case.state(9, seed=3), rows=rows, out=target)
    assert torch.equal(target, expected)


# ---- bit for bit --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=CASE_NAMES)
def test_chunks_give_the_same_bits(case: RecurrentCase, dtype: torch.dtype) -> None:
    """One step, steps of random lengths, and token by token."""
    num_tokens = 75
    inputs = case.inputs(num_tokens, dtype, seed=2)
    state = case.state(num_slots=1, seed=3)
    expected_state = state.clone()
    expected = run_case(case, inputs, expected_state, ragged_rows([num_tokens], seed=0, num_slots=1))
    for seed, longest in ((1, 40), (2, 5), (3, 1)):
        rng = np.random.default_rng(seed)
        held, parts, done = state.clone(), [], 0
        while done < num_tokens:
            length = min(int(rng.integers(1, longest + 1)), num_tokens - done)
            part = case.tokens(inputs, slice(done, done + length))
            parts.append(run_case(case, part, held, ragged_rows([length], seed=0, num_slots=1)))
            done += length
        assert torch.equal(torch.cat(parts), expected)
        assert torch.equal(held, expected_state)


@pytest.mark.parametrize("case", CASES, ids=CASE_NAMES)
def test_a_sequence_does_not_depend_on_its_neighbours(case: RecurrentCase) -> None:
    """Alone in another slot, or beside others."""
    lengths = [4, 1, 37, 1, 2]
    rows = ragged_rows(lengths, seed=5)
    inputs = case.inputs(rows.num_tokens, torch.float32, seed=6)
    state = case.state(num_slots=9, seed=7)
    before = state.clone()
    together = run_case(case, inputs, state, rows)
    for first, end, slot, _ in rows.spans():
        alone = before[slot : slot + 1].clone()
        out = run_case(
            case, case.tokens(inputs, slice(first, end)), alone, ragged_rows([end - first], seed=0, num_slots=1)
        )
        assert torch.equal(out, together[first:end])
        assert torch.equal(alone[0], state[slot])


@pytest.mark.parametrize("case", CASES, ids=CASE_NAMES)
def test_checkpoints_are_the_states_of_plain_decoding(case: RecurrentCase) -> None:
    """Verifying five tokens leaves after each the state, and gives the rows, that one token a step gives."""
    inputs = case.inputs(5, torch.float32, seed=6)
    state = case.state(num_slots=1, seed=7)
    plain = state.clone()
    rows = RecurrentRows(np.array([0, 5]), np.array([0]), np.array([2]))
    checkpoint = torch.zeros(7, *state.shape[1:])
    verified = run_case(case, inputs, state, rows, checkpoint=checkpoint)
    for j in range(5):
        out = run_case(case, case.tokens(inputs, slice(j, j + 1)), plain, ragged_rows([1], seed=0, num_slots=1))
        assert torch.equal(out[0], verified[j])
        assert torch.equal(plain[0], checkpoint[2 + j])
    assert torch.equal(plain, state)
    assert bool((checkpoint[:2] == 0).all())


@pytest.mark.parametrize("lengths", [[300, 1, 40], [1] * 12, [1] * 4], ids=["prefill", "decode", "few"])
@pytest.mark.parametrize("case", [CASES[0], CASES[6], CASES[13]], ids=["conv", "delta", "mamba"])
def test_threads_do_not_change_the_bits(case: RecurrentCase, lengths: list[int]) -> None:
    rows = ragged_rows(lengths, seed=5, num_slots=12)
    inputs = case.inputs(rows.num_tokens, torch.float32, seed=6)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            state = case.state(num_slots=12, seed=7)
            results.append((run_case(case, inputs, state, rows), state))
    finally:
        torch.set_num_threads(threads)
    for out, state in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(state, results[0][1])


# ---- numbers at the edge ------------------------------------------------------------------------------


def test_a_decay_that_forgets_everything_leaves_the_new_token_alone() -> None:
    """exp(-1e4) is 0: the state becomes k u^T, free of what it held, even where that was large."""
    rows = ragged_rows([1], seed=0, num_slots=1)
    k, v = torch.randn(1, 1, 16), torch.randn(1, 1, 8)
    state, out = torch.full((1, 1, 16, 8), 1e30), torch.empty(1, 1, 8)
    gate = torch.full((1, 1), -1e4)
    gated_delta(k, k, v, gate, torch.ones(1, 1), state, rows, out, scale=1.0, l2norm=True)
    unit = k[0, 0] / k[0, 0].norm()
    close(state[0, 0], torch.outer(unit, v[0, 0]), 1e-5)
    close(out[0, 0], v[0, 0], 1e-5)


def test_keys_of_zeros_are_normalised_to_zeros() -> None:
    rows = ragged_rows([3], seed=0, num_slots=1)
    zeros = torch.zeros(3, 1, 16)
    state, out = torch.randn(1, 1, 16, 8), torch.empty(3, 1, 8)
    before = state.clone()
    gated_delta(
        zeros,
        zeros,
        torch.randn(3, 1, 8),
        torch.zeros(3, 1),
        torch.ones(3, 1),
        state,
        rows,
        out,
        scale=1.0,
        l2norm=True,
    )
    assert torch.equal(state, before)
    assert bool((out == 0).all())


def test_silu_of_large_inputs_does_not_overflow() -> None:
    rows = ragged_rows([1], seed=0, num_slots=1)
    x, out = torch.tensor([[500.0, -500.0, 88.5, -88.5]]), torch.empty(1, 4)
    causal_conv(x, torch.ones(4, 2), None, torch.zeros(1, 4, 1), rows, out, silu=True)
    close(out, torch.nn.functional.silu(x.double()), 1e-6)


@pytest.mark.parametrize("case", SMALL_CASES, ids=SMALL_NAMES)
def test_a_step_without_sequences_does_nothing(case: RecurrentCase) -> None:
    state = case.state(num_slots=2, seed=1)
    before = state.clone()
    out = run_case(case, case.inputs(0, torch.float32, seed=1), state, ragged_rows([], seed=0))
    assert out.shape[0] == 0
    assert torch.equal(state, before)


@pytest.mark.parametrize("level", ["0", "1"])
def test_every_instruction_set_passes(level: str) -> None:
    """The same tests with a lesser instruction set, chosen before the process starts."""
    if "EDGELLM_CPU_ISA" in os.environ:
        pytest.skip("already inside the lesser instruction set")
    if ["portable", "avx2", "avx512"].index(_ops.isa_name()) <= int(level):
        pytest.skip(f"this machine's best instruction set is {_ops.isa_name()}")
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__))]
    done = subprocess.run(tests, env=os.environ | {"EDGELLM_CPU_ISA": level}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]


# ---- refusals -----------------------------------------------------------------------------------------


def refused(case: RecurrentCase, message: str, *, rows: RecurrentRows | None = None, **changes: object) -> None:
    """The call with one argument changed raises, and writes nothing."""
    rows = rows or ragged_rows([2, 1], seed=1, num_slots=4)
    inputs = case.inputs(3, torch.float32, seed=1)
    state = case.state(num_slots=4, seed=2)
    out = torch.full_like(inputs[case.value_name], 9.0)
    before = state.clone()
    arguments = inputs | case.options() | {"state": state, "rows": rows, "out": out, "checkpoint": None} | changes
    with pytest.raises(InvalidArgumentError, match=message):
        KERNELS[case.kind](**arguments)
    assert torch.equal(state, before)
    assert bool((out == 9.0).all())


CONV, DELTA, MAMBA = CASES[2], CASES[2 + 6], CASES[2 + 13]


@pytest.mark.parametrize("case", [CONV, DELTA, MAMBA], ids=["conv", "delta", "mamba"])
def test_what_no_kernel_takes_is_refused(case: RecurrentCase) -> None:
    state = case.state(num_slots=4, seed=2)
    inputs = case.inputs(3, torch.float32, seed=1)
    value = inputs[case.value_name]
    refused(
        case, r"state is .* rows need at least \(4", state=state[:2], rows=ragged_rows([2, 1], seed=0, slots=[3, 0])
    )
    refused(case, "state is .*float64", state=state.double())
    refused(case, "state is .*rows need", state=state[0])
    refused(case, "state .*strides", state=state.mT.contiguous().mT if state.shape[-1] > 1 else state[:, ::2])
    refused(case, "out is .*float16", out=torch.full_like(value, 9.0).half())
    refused(case, "out is", out=torch.full((4, *value.shape[1:]), 9.0))
    refused(case, "out .*strides", out=torch.full((3, *value.shape[1:-1], 2 * value.shape[-1]), 9.0)[..., ::2])
    refused(case, "out .*strides", out=torch.full((1, *value.shape[1:]), 9.0).expand(value.shape))
    refused(case, "checkpoint is None", rows=RecurrentRows([0, 2, 3], [0, 1], [-1, 0]))
    few = case.state(num_slots=1, seed=1)
    refused(case, "checkpoint is .*need at least", checkpoint=few, rows=RecurrentRows([0, 2, 3], [0, 1], [0, -1]))
    short = {"rows": ragged_rows([2], seed=0, num_slots=4)}
    refused(case, "is .* is needed", **short)


def test_weights_and_rows_that_do_not_fit_the_convolution_are_refused() -> None:
    refused(CONV, "weight .*W from 1 to 8", weight=torch.ones(5, 9))
    refused(CONV, "weight is .*needed", weight=torch.ones(4, 3))
    refused(CONV, "weight is .*float32", weight=torch.ones(5, 3, dtype=torch.bfloat16))
    refused(CONV, "weight is .*contiguous", weight=torch.ones(3, 5).t())
    refused(CONV, "bias is", bias=torch.ones(4))
    refused(CONV, "x is .*T, C", x=torch.ones(3, 5, 1))
    refused(CONV, "x is .*float64", x=torch.ones(3, 5, dtype=torch.float64))


def test_heads_and_dtypes_that_do_not_fit_the_delta_rule_are_refused() -> None:
    refused(DELTA, "multiple of Hk", k=torch.ones(3, 2, 17))
    refused(DELTA, "at most 512", k=torch.ones(3, 1, 513))
    refused(DELTA, "q is", q=torch.ones(3, 1, 16))
    refused(DELTA, "one dtype", v=torch.ones(3, 3, 5, dtype=torch.bfloat16))
    refused(DELTA, "decay is .*bfloat16", decay=torch.zeros(3, 3, dtype=torch.bfloat16))
    refused(DELTA, "beta is", beta=torch.zeros(3, 2))


def test_groups_and_dtypes_that_do_not_fit_the_scan_are_refused() -> None:
    refused(MAMBA, "multiple of G", b=torch.ones(3, 2, 37))
    refused(MAMBA, "at most 1024", b=torch.ones(3, 3, 1025))
    refused(MAMBA, "c is", c=torch.ones(3, 3, 36))
    refused(MAMBA, "one dtype", c=torch.ones(3, 3, 37, dtype=torch.bfloat16))
    refused(MAMBA, "dt is", dt=torch.ones(3, 2))
    refused(MAMBA, "a is", a=torch.ones(2))
    refused(MAMBA, "d is", d=torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize(
    ("starts", "slots", "checkpoints", "message"),
    [
        ([1, 2], [0], None, "query_start is .*start at 0"),
        ([0, 3, 2], [0, 1], None, "never fall"),
        ([0, 3], [0, 1], None, r"query_start is .*\(3,\)"),
        ([0, 1, 2], [1, 1], None, "state row of its own"),
        ([0, 1], [-1], None, "0 or more"),
        ([0, 2, 4], [0, 1], [0, 1], "share row 1"),
        ([0, 2, 4], [0, 1], [3, 3], "share row 3"),
        ([0, 1], [0], [0, 1], r"checkpoint_start is .*\(1,\)"),
        ([0.0, 1.0], [0], None, "query_start is .*float64"),
        ([0, 1], [[0]], None, "slots is"),
        ([0, 1], [2**32], None, "fit int32"),
    ],
)
def test_rows_that_contradict_themselves_are_refused(
    starts: list[int], slots: list[int], checkpoints: list[int] | None, message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        RecurrentRows(starts, slots, checkpoints)


def test_rows_are_copies_that_nobody_can_change() -> None:
    starts, slots = np.array([0, 2, 3], np.int32), np.array([4, 1], np.int32)
    rows = RecurrentRows(starts, slots, np.array([-1, 6], np.int32))
    starts[:] = slots[:] = 100
    assert rows.spans() == [(0, 2, 4, -1), (2, 3, 1, 6)]
    assert (rows.num_tokens, rows.num_sequences, rows.min_slots, rows.min_checkpoints, rows.longest) == (3, 2, 5, 7, 2)
    with pytest.raises(ValueError, match="read-only"):
        rows.slots[0] = 3
