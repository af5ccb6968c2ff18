"""The gated delta rule on CUDA: against the reference in float64, and bit for bit the same however rows are cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from recurrent_cases import DeltaCase, ragged_rows
from row_ops import ROW_TYPES, assert_same_bits, captured, record_launches
from state_case import apart, poisoned_state, real_tokens, relative_error, state_rows, without_checkpoints

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cu import gated_delta_chunks as chunks
from edgellm.kernels.cu.gated_delta import SHORT_ROWS, gated_delta, gated_delta_workspace, launch_config
from edgellm.kernels.cu.state_rows import StateRows
from edgellm.kernels.ref import gated_delta as ref

CASES = [
    DeltaCase(key_heads=2, heads=4, key_dim=128, value_dim=128),
    DeltaCase(key_heads=2, heads=2, key_dim=64, value_dim=64),
    DeltaCase(key_heads=1, heads=2, key_dim=256, value_dim=256),
    DeltaCase(key_heads=1, heads=3, key_dim=16, value_dim=16),
    DeltaCase(key_heads=2, heads=4, key_dim=32, value_dim=32),
    DeltaCase(key_heads=2, heads=6, key_dim=8, value_dim=12),
    DeltaCase(key_heads=1, heads=2, key_dim=64, value_dim=96, l2norm=False),
    DeltaCase(key_heads=1, heads=3, key_dim=17, value_dim=5),
]
CASE_NAMES = [case.label for case in CASES]
LENGTHS, SLOTS = (1, 9, 0, 70, 3, 33), (5, 0, 3, 7, -1, 2)  # the row of 3 tokens is padding
NUM_SLOTS = 9
HALF_TYPES = (torch.float16, torch.bfloat16)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
# Of the norm: chunks round q, k and what they make of them to float16; out is rounded to its type besides.
CHUNK_STATE_ERROR = 1e-3
CHUNK_OUT_ERROR = {torch.float16: 1.2e-3, torch.bfloat16: 2.8e-3}


@dataclass
class Step:
    """Tensors of one step, on the CPU until `to`; the tokens of padding rows are NaN."""

    case: DeltaCase
    inputs: dict[str, torch.Tensor]
    state: torch.Tensor
    rows: StateRows
    out: torch.Tensor
    checkpoint: torch.Tensor | None = None

    def to(self, device: str, *, gap: int = 0) -> Step:
        inputs = {name: apart(value.to(device), gap) for name, value in self.inputs.items()}
        arrays = (self.rows.query_start, self.rows.slots, self.rows.checkpoint_start)
        rows = StateRows(*(None if array is None else array.to(device) for array in arrays))
        kept = None if self.checkpoint is None else self.checkpoint.to(device)
        return Step(self.case, inputs, self.state.to(device), rows, apart(self.out.to(device), gap), kept)

    def run(self, **options: Any) -> None:
        """On the device; the CUDA operator."""
        gated_delta(
            **self.inputs,
            state=self.state,
            rows=self.rows,
            out=self.out,
            checkpoint=self.checkpoint,
            **self.case.options(),
            **options,
        )

    def expected(self) -> Step:
        """A copy after the reference, in float64."""
        wide = replace(
            self,
            state=self.state.double(),
            out=self.out.double().clone(),
            checkpoint=None if self.checkpoint is None else self.checkpoint.double(),
        )
        ref.gated_delta(
            **self.inputs,
            state=wide.state,
            rows=self.rows,
            out=wide.out,
            checkpoint=wide.checkpoint,
            **self.case.options(),
        )
        return wide

    def workspace(self) -> torch.Tensor:
        """As large as it is said to be, full of NaN."""
        size = workspace_of(self.case, len(self.out), self.rows.num_rows, self.out.dtype)
        return torch.full((size,), 0xFF, dtype=torch.uint8, device=self.out.device)


def workspace_of(case: DeltaCase, tokens: int, rows: int, dtype: torch.dtype) -> int:
    sizes = {name: getattr(case, name) for name in ("key_heads", "heads", "key_dim", "value_dim")}
    return gated_delta_workspace(tokens, rows, **sizes, dtype=dtype)


def make_step(
    case: DeltaCase,
    dtype: torch.dtype,
    lengths: Sequence[int] = LENGTHS,
    slots: Sequence[int] = SLOTS,
    *,
    verified: Sequence[int] = (),
    seed: int = 1,
    size: float = 1.0,
) -> Step:
    """`size`: of the values and of the state, which is linear in both."""
    num_tokens = sum(lengths) + 2  # two behind the last row
    rows = state_rows(lengths, slots, verified=verified)
    inputs = case.inputs(num_tokens, dtype, seed=seed)
    inputs["v"] *= size
    for tensor in inputs.values():
        tensor[~real_tokens(rows, num_tokens)] = float("nan")
    num_kept = sum(lengths[row] for row in verified)
    return Step(
        case,
        inputs,
        poisoned_state(NUM_SLOTS, case.state_shape, slots, seed=seed) * size,
        rows,
        torch.full_like(inputs["v"], 9.0),
        torch.full((num_kept, *case.state_shape), float("nan")) if verified else None,
    )


def assert_near(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(actual.double().cpu(), expected, rtol=tolerance, atol=tolerance, equal_nan=True)


# ---- reference ------------------------------------------------------------------------------------------------------


def test_reference_takes_rows_of_the_device_as_those_of_the_cpu() -> None:
    case = CASES[4]
    step = make_step(case, torch.float32, (1, 9, 0, 4), (5, 0, 3, 7), verified=(1, 3))
    other = make_step(case, torch.float32, (1, 9, 0, 4), (5, 0, 3, 7), verified=(1, 3))
    cpu_rows = ragged_rows((1, 9, 0, 4), seed=0, slots=(5, 0, 3, 7), verified=(1, 3))
    for one, rows in ((step, step.rows), (other, cpu_rows)):
        ref.gated_delta(
            **one.inputs, state=one.state, rows=rows, out=one.out, checkpoint=one.checkpoint, **case.options()
        )
    for name in ("state", "out", "checkpoint"):
        assert_same_bits(getattr(step, name), getattr(other, name))


def test_reference_leaves_padding_alone() -> None:
    step = make_step(CASES[5], torch.float32)
    after = step.expected()
    real = real_tokens(step.rows, len(step.out))
    assert bool(after.out[real].isfinite().all())
    assert bool((after.out[~real] == 9.0).all())
    used = [slot for slot in SLOTS if slot >= 0]
    assert bool(after.state[used].isfinite().all())
    assert bool(after.state[[1, 4, 6, 8]].isnan().all())


# ---- launches and refusals ------------------------------------------------------------------------------------------


def test_launch_config() -> None:
    assert launch_config(1, 32, 128, 128).grid == (8, 32, 1)  # few warps: a block each
    assert launch_config(1, 32, 128, 128).block == (32, 1, 1)
    assert launch_config(8, 32, 128, 128).grid == (2, 32, 8)
    assert launch_config(8, 32, 128, 128).block == (32, 4, 1)
    assert launch_config(64, 64, 128, 12).block == (32, 1, 1)
    assert launch_config(64, 64, 128, 20).grid == (1, 64, 64)
    assert launch_config(64, 64, 256, 20).grid == (1, 64, 64)
    assert launch_config(64, 64, 256, 20).block == (32, 3, 1)


@pytest.mark.parametrize("groups", [1, 2])
def test_scan_config_is_the_size_of_its_struct(monkeypatch: pytest.MonkeyPatch, groups: int) -> None:
    shape = chunks.DeltaShape(1000, 3, 2, 4, 128, 96)
    monkeypatch.setattr(chunks, "SCAN_GROUPS", groups)
    config = chunks.scan_config(shape)
    assert config.grid == (-(-3 // groups), 4, 3)
    assert config.block == (128 * groups, 1, 1)
    assert config.shared_bytes == groups * (2 * 128 * 32 + 2 * 64 * 32 + 16)
    assert config.shared_bytes <= 99 * 1024  # what every supported device has


@pytest.mark.parametrize("dtype", ROW_TYPES)
@pytest.mark.parametrize("case", CASES, ids=CASE_NAMES)
def test_variants(monkeypatch: pytest.MonkeyPatch, case: DeltaCase, dtype: torch.dtype) -> None:
    launches = record_launches(monkeypatch)
    step = make_step(case, dtype, (40,), (3,))
    step.run()
    width = next(size for size in (32, 64, 128, 256) if case.key_dim <= size)
    assert [launch.key for launch in launches] == [(dtype, width)]
    params = launches[0].params
    assert params["is_wide"] == int(case.value_dim % 4 == 0)
    assert params["group"] == case.heads // case.key_heads
    assert params["checkpoint_start"] is None
    assert params["longest"] > 1 << 30


@pytest.mark.parametrize("dtype", ROW_TYPES)
@pytest.mark.parametrize("case", CASES, ids=CASE_NAMES)
def test_chunks_of_long_rows(monkeypatch: pytest.MonkeyPatch, case: DeltaCase, dtype: torch.dtype) -> None:
    launches = record_launches(monkeypatch)
    lengths = (3000, 1, 200)
    tokens = sum(lengths)
    inputs = case.inputs(tokens, dtype, seed=0)
    size = workspace_of(case, tokens, 3, dtype)
    by_chunks = dtype != torch.float32 and case.l2norm and case.key_dim in (64, 128)
    assert (size > 0) == (dtype != torch.float32 and case.key_dim in (64, 128))
    state, out = torch.zeros(3, *case.state_shape), torch.empty_like(inputs["v"])
    options = {"state": state, "rows": state_rows(lengths, (0, 1, 2)), "out": out, **case.options()}
    gated_delta(**inputs, **options, workspace=torch.empty(size, dtype=torch.uint8))
    names = [launch.spec.name for launch in launches]
    # ceil(3201 / 64) + 2 places, 32 a launch
    assert names == ["delta_solve", "delta_scan", "delta_read"] * (2 * by_chunks) + ["gated_delta"]
    assert launches[-1].params["longest"] == (SHORT_ROWS if by_chunks else 2**31 - 1)
    if by_chunks:
        solves = launches[0], launches[3]
        assert [(one.params["first_place"], one.params["num_places"]) for one in solves] == [(0, 32), (32, 21)]
        assert [one.config.grid[:2] for one in solves] == [(32, case.heads), (21, case.heads)]
        used = launches[0].params
        assert used["scales"] - used["queries"] + 32 * case.heads * case.value_dim // 32 * 16 == size
    launches.clear()
    gated_delta(**inputs, **options, workspace=torch.empty(size, dtype=torch.uint8), deterministic=True)
    gated_delta(**inputs, **options)
    assert [launch.spec.name for launch in launches] == ["gated_delta"] * 2


def test_short_steps_go_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = record_launches(monkeypatch)
    case, dtype = CASES[1], torch.bfloat16
    for lengths in ((64,), (8,) * 20):
        step = make_step(case, dtype, [*lengths[:-1], lengths[-1] - 2], range(len(lengths)))
        step.state = torch.zeros(20, *case.state_shape)
        step.run(workspace=torch.empty(workspace_of(case, 200, 20, dtype), dtype=torch.uint8))
    assert [launch.spec.name for launch in launches] == ["gated_delta"] * 2
    assert workspace_of(case, 64, 1, dtype) == 0


def test_no_tokens_no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = record_launches(monkeypatch)
    step = make_step(CASES[1], torch.float32)
    step.inputs = {name: value[:0] for name, value in step.inputs.items()}
    step.out = step.out[:0]
    step.run()
    assert not launches


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(10, 2, 16)}, "q is"),
        ({"q": torch.zeros(10, 2, 32).half()}, "q is"),
        ({"k": torch.zeros(10, 3, 32)}, "Hv a multiple of Hk"),
        ({"k": torch.zeros(10, 2, 257)}, "at most 256 is supported"),
        ({"k": torch.zeros(10, 2, 32).double()}, "k is torch.float64"),
        ({"v": torch.zeros(9, 4, 32)}, "v is"),
        ({"out": torch.zeros(10, 4, 32, 1)}, "out is"),
        ({"out": torch.zeros(10, 32, 4).transpose(1, 2)}, "rows apart but without gaps"),
        ({"decay": torch.zeros(10, 4).half()}, "decay is"),
        ({"beta": torch.zeros(10, 2)}, "beta is"),
        ({"state": torch.zeros(9, 4, 32, 31)}, "state is"),
        ({"state": torch.zeros(9, 4, 32, 32).double()}, "state is"),
        ({"checkpoint": torch.zeros(9, 4, 16, 32)}, "checkpoint is"),
        ({"rows": StateRows(torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int32))}, "query_start is"),
        ({"rows": StateRows(torch.zeros(3, dtype=torch.int32), torch.zeros(2))}, "slots is"),
    ],
)
def test_bad_arguments(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str) -> None:
    launches = record_launches(monkeypatch)
    step = make_step(CASES[4], torch.float32, (8,), (0,))
    arguments = {**step.inputs, "state": step.state, "rows": step.rows, "out": step.out, **step.case.options()}
    with pytest.raises(InvalidArgumentError, match=message):
        gated_delta(**(arguments | changes))
    assert not launches


def test_rows_out_of_line_go_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = record_launches(monkeypatch)
    step = make_step(CASES[1], torch.bfloat16, (100,), (0,))
    for name in ("q", "k", "v"):
        inputs = step.inputs | {name: apart(step.inputs[name], 2)}
        replace(step, inputs=inputs).run(workspace=step.workspace())
    replace(step, out=apart(step.out, 1)).run(workspace=step.workspace())
    assert [launch.spec.name for launch in launches] == ["gated_delta"] * 4
    step.run(workspace=step.workspace())
    assert len(launches) == 8


@pytest.mark.parametrize("workspace", [torch.empty(100, dtype=torch.uint8), torch.empty(1 << 20)])
def test_bad_workspace(monkeypatch: pytest.MonkeyPatch, workspace: torch.Tensor) -> None:
    launches = record_launches(monkeypatch)
    step = make_step(CASES[1], torch.bfloat16, (100,), (0,))
    with pytest.raises(InvalidArgumentError, match="workspace is"):
        step.run(workspace=workspace)
    assert not launches


# ---- device: token by token -----------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ROW_TYPES)
@pytest.mark.parametrize("case", CASES, ids=CASE_NAMES)
def test_device_equals_reference(case: DeltaCase, dtype: torch.dtype) -> None:
    for gap, verified in ((0, ()), (7, (1, 5))):
        step = make_step(case, dtype, verified=verified)
        actual, expected = step.to("cuda", gap=gap), step.expected()
        actual.run()
        assert_near(actual.out, expected.out, TOLERANCE[dtype])
        assert_near(actual.state, expected.state, TOLERANCE[torch.float32])
        if verified:
            assert_near(actual.checkpoint, expected.checkpoint, TOLERANCE[torch.float32])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ROW_TYPES)
@pytest.mark.parametrize("case", CASES, ids=CASE_NAMES)
def test_cutting_rows_and_company_change_no_bit(case: DeltaCase, dtype: torch.dtype) -> None:
    whole = make_step(case, dtype, (40, 13), (4, 1)).to("cuda")
    parts = make_step(case, dtype, (40, 13), (4, 1)).to("cuda")
    whole.run()
    for row, cuts in ((0, (0, 1, 2, 7, 23, 40)), (1, (40, 53))):
        for start, end in pairwise(cuts):
            part = slice(start, end)
            gated_delta(
                **{name: value[part] for name, value in parts.inputs.items()},
                state=parts.state,
                rows=state_rows((end - start,), ((4, 1)[row],), device="cuda"),
                out=parts.out[part],
                **case.options(),
            )
    assert_same_bits(parts.out, whole.out)
    assert_same_bits(parts.state, whole.state)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ROW_TYPES)
@pytest.mark.parametrize("case", CASES, ids=CASE_NAMES)
def test_verified_rows_are_decode_rows(case: DeltaCase, dtype: torch.dtype) -> None:
    """Outputs, and the state after each token, in one step of five tokens a row as in five steps of one."""
    lengths, slots = (5, 5, 5), (6, 2, 8)
    verified = make_step(case, dtype, lengths, slots, verified=(0, 1, 2)).to("cuda")
    decoded = make_step(case, dtype, lengths, slots).to("cuda")
    workspace = torch.empty(max(1, workspace_of(case, 4096, 3, dtype)), dtype=torch.uint8, device="cuda")
    verified.run(workspace=workspace)
    for token in range(5):
        places = torch.tensor([token, 5 + token, 10 + token], device="cuda")
        out = torch.empty_like(decoded.out[places])
        gated_delta(
            **{name: value[places] for name, value in decoded.inputs.items()},
            state=decoded.state,
            rows=state_rows((1, 1, 1), slots, device="cuda"),
            out=out,
            workspace=workspace,
            **case.options(),
        )
        assert_same_bits(out, verified.out[places])
        kept = verified.checkpoint[[10 + token, 5 + token, token]]
        assert_same_bits(kept, decoded.state[list(slots)])
    assert_same_bits(decoded.state, verified.state)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_graph_serves_other_rows(dtype: torch.dtype) -> None:
    case = CASES[0]
    step = make_step(case, dtype, (3, 0, 150, 2), (1, -1, 0, 4), verified=(0, 3)).to("cuda")
    step.inputs = {name: value.nan_to_num(0.5) for name, value in step.inputs.items()}
    workspace = step.workspace()
    graph = captured(lambda: step.run(workspace=workspace))
    other = make_step(case, dtype, (80, 30, 1, 44), (3, 2, -1, 5), verified=(1,))
    fresh = make_step(case, dtype, (80, 30, 1, 44), (3, 2, -1, 5), verified=(1,), seed=5).state.cuda()
    eager = replace(step, rows=other.to("cuda").rows, state=fresh.clone(), out=torch.full_like(step.out, 9.0))
    eager.checkpoint = torch.full((30, *case.state_shape), float("nan"), device="cuda")
    eager.run(workspace=workspace)
    for name in ("query_start", "slots", "checkpoint_start"):
        getattr(step.rows, name).copy_(getattr(eager.rows, name))
    step.state.copy_(fresh)
    step.out.fill_(9.0)
    workspace.fill_(0xFF)
    graph.replay()
    assert_same_bits(step.out, eager.out)
    assert_same_bits(step.state, eager.state)
    assert_same_bits(step.checkpoint, eager.checkpoint[:5])  # rows beyond the last are not written


# ---- device: by chunks ----------------------------------------------------------------------------------------------

CHUNK_CASES = [case for case in CASES if case.key_dim in (64, 128) and case.l2norm] + [
    DeltaCase(key_heads=1, heads=3, key_dim=128, value_dim=64),
    DeltaCase(key_heads=1, heads=1, key_dim=64, value_dim=256),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize("case", CHUNK_CASES, ids=[case.label for case in CHUNK_CASES])
@pytest.mark.parametrize("size", [1.0, 3e3, 1e-4])
def test_chunks_against_float64(case: DeltaCase, dtype: torch.dtype, size: float) -> None:
    """Long rows beside decode rows, verified rows and padding; what goes token by token keeps its bits."""
    if dtype == torch.float16 and size != 1.0:
        pytest.skip("float16 rows have no such values")
    lengths, slots = (33, 1, 64, 65, 5, 300, 128, 7), (5, 0, 3, 7, 6, 2, -1, 4)
    verified, by_token = (4,), (1, 4, 7)
    step = make_step(case, dtype, lengths, slots, verified=verified, size=size)
    actual, expected, plain = step.to("cuda", gap=4), step.expected(), step.to("cuda")
    actual.run(workspace=actual.workspace())
    plain.run()
    real = real_tokens(step.rows, len(step.out))
    used = [slot for slot in slots if slot >= 0]
    for slot in used:
        assert relative_error(actual.state[slot], expected.state[slot]) < CHUNK_STATE_ERROR, f"slot {slot}"
    for first, end, slot, _ in step.rows.spans():
        assert relative_error(actual.out[first:end], expected.out[first:end]) < CHUNK_OUT_ERROR[dtype], f"slot {slot}"
    starts = step.rows.query_start.tolist()
    for row in by_token:
        assert_same_bits(actual.out[starts[row] : starts[row + 1]], plain.out[starts[row] : starts[row + 1]])
        assert_same_bits(actual.state[slots[row]], plain.state[slots[row]])
    assert_same_bits(actual.checkpoint, plain.checkpoint)
    assert bool((actual.out[~real] == 9.0).all())
    assert bool(actual.state[[1, 8]].isnan().all())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_chunks_of_a_long_prompt(dtype: torch.dtype) -> None:
    """More chunks than one launch takes; and a workspace that holds fewer gives the same bits."""
    case = CHUNK_CASES[0]
    step = make_step(case, dtype, (100, 2700), (1, 4))
    actual, cramped, expected = step.to("cuda"), step.to("cuda"), step.expected()
    workspace = actual.workspace()
    actual.run(workspace=workspace)
    cramped.run(workspace=workspace[: len(workspace) // 5])
    for slot in (1, 4):
        assert relative_error(actual.state[slot], expected.state[slot]) < CHUNK_STATE_ERROR
    assert relative_error(actual.out[:2800], expected.out[:2800]) < CHUNK_OUT_ERROR[dtype]
    assert_same_bits(actual.out, cramped.out)
    assert_same_bits(actual.state, cramped.state)


@pytest.mark.gpu
@pytest.mark.parametrize("decay", [0.0, -1e-3, -8.0, -300.0])
def test_chunks_of_keys_that_repeat(decay: float) -> None:
    """The system to solve is at its worst where all keys are one and every update is in full."""
    case, dtype = CHUNK_CASES[0], torch.bfloat16
    step = make_step(case, dtype, (200,), (1,))
    step.inputs["k"][:] = step.inputs["k"][:1]
    step.inputs["beta"][:200] = 1.0
    step.inputs["decay"][:200] = decay
    actual, expected = step.to("cuda"), step.expected()
    actual.run(workspace=actual.workspace())
    assert relative_error(actual.out[:200], expected.out[:200]) < 2 * CHUNK_OUT_ERROR[dtype]
    assert relative_error(actual.state[1], expected.state[1]) < 2 * CHUNK_STATE_ERROR


@pytest.mark.gpu
def test_deterministic_goes_token_by_token() -> None:
    case = CHUNK_CASES[0]
    step = make_step(case, torch.bfloat16, (300,), (1,))
    plain, same = step.to("cuda"), step.to("cuda")
    plain.run()
    same.run(workspace=same.workspace(), deterministic=True)
    assert_same_bits(same.out, plain.out)
    assert_same_bits(same.state, plain.state)
    assert without_checkpoints(step.rows).checkpoint_start is None
