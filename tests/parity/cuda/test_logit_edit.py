"""Changes of logits: the reference against the host's functions, then the device against the reference, bit for bit."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from row_ops import captured, record_launches
from sample_case import random_logits

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cu.logit_edit import EditFlag, IdLists, LogitEdits, launch_config, logit_edit, remap_ids
from edgellm.kernels.cu.sample import LOGIT_TYPES
from edgellm.kernels.ref import logit_edit as ref
from edgellm.sampling.penalties import TokenCounter, apply_output_penalties, apply_repetition

INF, NAN = float("inf"), float("nan")


def lists(rng: np.random.Generator, num_rows: int, vocab_size: int, values: str = "") -> IdLists:
    """Up to 40 distinct ids a row, none in every third."""
    parts = [
        rng.choice(vocab_size, size=0 if row % 3 == 2 else int(rng.integers(1, min(40, vocab_size) + 1)), replace=False)
        for row in range(num_rows)
    ]
    ids = np.concatenate(parts).astype(np.int32)
    start = np.cumsum([0, *map(len, parts)]).astype(np.int32)
    of = {
        "": None,
        "counts": torch.from_numpy(rng.integers(1, 9, size=len(ids)).astype(np.int32)),
        "numbers": torch.from_numpy(rng.normal(size=len(ids)) * 5),
    }[values]
    return IdLists(torch.from_numpy(start), torch.from_numpy(ids), of)


def random_edits(seed: int, num_rows: int, vocab_size: int) -> LogitEdits:
    rng = np.random.default_rng(seed)
    numbers = [torch.from_numpy(rng.uniform(0.3, 2.0, size=num_rows)) for _ in range(3)]
    words = rng.integers(-(2**31), 2**31, size=(2, -(-vocab_size // 32))).astype(np.int32)
    return LogitEdits(
        bias=lists(rng, num_rows, vocab_size, "numbers"),
        mask=torch.from_numpy(words),
        mask_index=torch.from_numpy(rng.integers(-1, 2, size=num_rows).astype(np.int32)),
        seen=lists(rng, num_rows, vocab_size),
        repetition=numbers[0],
        output=lists(rng, num_rows, vocab_size, "counts"),
        presence=numbers[1],
        frequency=numbers[2],
        excluded=lists(rng, num_rows, vocab_size),
    )


def to_device(edits: LogitEdits) -> LogitEdits:
    def moved(part: IdLists | torch.Tensor | None) -> IdLists | torch.Tensor | None:
        if isinstance(part, IdLists):
            return IdLists(part.start.cuda(), part.ids.cuda(), None if part.values is None else part.values.cuda())
        return None if part is None else part.cuda()

    return LogitEdits(**{one.name: moved(getattr(edits, one.name)) for one in dataclasses.fields(edits)})


def by_reference(logits: torch.Tensor, edits: LogitEdits, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    out, flags = torch.zeros(num_rows, logits.shape[1], dtype=torch.float64), torch.zeros(num_rows, dtype=torch.int32)
    ref.logit_edit(logits, edits, out, flags)
    return out, flags


# ---- the reference -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 500])
def test_reference_is_the_host(vocab_size: int) -> None:
    logits = torch.from_numpy(random_logits(np.random.default_rng(1), "ties", (6, vocab_size)))
    edits = random_edits(vocab_size, 6, vocab_size)
    out, _ = by_reference(logits, edits, 6)
    for row in range(6):
        expected = logits[row].double().numpy()
        expected[host_ids(edits.bias, row)] += host_values(edits.bias, row)
        if int(edits.mask_index[row]) >= 0:
            words = edits.mask[int(edits.mask_index[row])].numpy()
            allowed = np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab_size]
            expected[allowed == 0] = -INF
        apply_repetition(expected, counter(edits.seen, row, vocab_size), float(edits.repetition[row]))
        presence, frequency = float(edits.presence[row]), float(edits.frequency[row])
        output = counter(edits.output, row, vocab_size)
        apply_output_penalties(expected, output, presence=presence, frequency=frequency)
        expected[host_ids(edits.excluded, row)] = -INF
        assert out[row].tolist() == expected.tolist()


def host_ids(part: IdLists, row: int) -> np.ndarray:
    return part.ids.numpy()[int(part.start[row]) : int(part.start[row + 1])]


def host_values(part: IdLists, row: int) -> np.ndarray:
    assert part.values is not None
    return part.values.numpy()[int(part.start[row]) : int(part.start[row + 1])]


def counter(part: IdLists, row: int, vocab_size: int) -> TokenCounter:
    made = TokenCounter(vocab_size)
    ids = host_ids(part, row)
    made.add_prompt(np.repeat(ids, 1 if part.values is None else host_values(part, row)))
    return made


FLAG_ROWS = torch.tensor([[0.0, NAN, -INF], [INF, -INF, -INF], [-INF, -INF, -INF], [1.0, -INF, -INF], [1.0, 2.0, 0.0]])
FLAG_EDITS = LogitEdits(
    mask=torch.tensor([[0b110], [0b011]], dtype=torch.int32),
    mask_index=torch.tensor([-1, -1, -1, 0, 1], dtype=torch.int32),
    excluded=IdLists(torch.tensor([0, 0, 0, 0, 0, 2], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)),
)
LEFT = EditFlag.LEFT_BY_GRAMMAR | EditFlag.LEFT_AT_LAST
FLAGS = [
    EditFlag.RAW_NAN | EditFlag.RAW_FINITE | LEFT,
    EditFlag.RAW_INFINITY,
    EditFlag(0),
    EditFlag.RAW_FINITE,
    EditFlag.RAW_FINITE | EditFlag.LEFT_BY_GRAMMAR,
]


def test_reference_flags() -> None:
    assert by_reference(FLAG_ROWS, FLAG_EDITS, 5)[1].tolist() == FLAGS


def test_reference_renames_ids() -> None:
    ids = torch.tensor([0, 2, -3, 5, 1], dtype=torch.int32)
    ref.remap_ids(ids, torch.tensor([40, 50, 60], dtype=torch.int32), ids)
    assert ids.tolist() == [40, 60, -3, -1, 50]


# ---- the wrapper ---------------------------------------------------------------------------------------------------


def test_launch_config() -> None:
    assert launch_config(2, 4096).grid == (1, 2, 1)
    assert launch_config(2, 4097).grid == (2, 2, 1)


def call(logits: torch.Tensor | None = None, edits: LogitEdits | None = None, **changes: torch.Tensor) -> None:
    arguments: dict[str, torch.Tensor] = {
        "out": torch.zeros(6, 500, dtype=torch.float64),
        "flags": torch.zeros(6, dtype=torch.int32),
    }
    logit_edit(
        torch.zeros(6, 500) if logits is None else logits,
        random_edits(1, 6, 500) if edits is None else edits,
        **arguments | changes,
    )


def test_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = record_launches(monkeypatch)
    call()
    call(edits=LogitEdits(), row_index=torch.zeros(6, dtype=torch.int32))
    remap_ids(*(torch.zeros(size, dtype=torch.int32) for size in (200, 9, 200)))
    assert [launch.spec.name for launch in launches] == ["logit_edit", "logit_edit", "remap_ids"]
    assert launches[0].params["mask_stride"] == 16
    assert launches[1].params["bias_start"] is None
    assert launches[2].config.grid == (2, 1, 1)


GOOD = random_edits(1, 6, 500)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits": torch.zeros(6, 500, dtype=torch.int32)}, "logits is"),
        ({"out": torch.zeros(6, 500)}, "out is"),
        ({"out": torch.zeros(5, 500, dtype=torch.float64)}, "out is"),
        ({"flags": torch.zeros(6)}, "flags is"),
        ({"row_index": torch.zeros(6)}, "row_index is"),
        ({"edits": LogitEdits(bias=GOOD.seen)}, "bias has values=False"),
        ({"edits": LogitEdits(excluded=GOOD.bias)}, "excluded has values=True"),
        ({"edits": LogitEdits(seen=GOOD.seen)}, "repetition and the list"),
        ({"edits": LogitEdits(presence=GOOD.presence)}, "presence and the list"),
        ({"edits": LogitEdits(mask=GOOD.mask)}, "mask and mask_index"),
        ({"edits": dataclasses.replace(GOOD, mask=torch.zeros(2, 15, dtype=torch.int32))}, "mask is"),
        ({"edits": random_edits(1, 7, 500)}, "bias.start is"),
    ],
)
def test_bad_arguments(monkeypatch: pytest.MonkeyPatch, changes: dict[str, torch.Tensor], message: str) -> None:
    launches = record_launches(monkeypatch)
    with pytest.raises(InvalidArgumentError, match=message):
        call(**changes)
    assert not launches


# ---- the device ----------------------------------------------------------------------------------------------------


def assert_device_equals_reference(logits: torch.Tensor, edits: LogitEdits, num_rows: int) -> None:
    out = torch.zeros(num_rows, logits.shape[1] + 3, dtype=torch.float64, device="cuda")[:, : logits.shape[1]]
    flags = torch.zeros(num_rows, dtype=torch.int32, device="cuda")
    logit_edit(logits.cuda(), to_device(edits), out, flags)
    expected_out, expected_flags = by_reference(logits, edits, num_rows)
    torch.testing.assert_close(out.cpu(), expected_out, rtol=0, atol=0, equal_nan=True)
    assert flags.tolist() == expected_flags.tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [1, 7, 31, 32, 33, 4096, 49_152, 151_936])
def test_device_equals_reference(vocab_size: int) -> None:
    logits = torch.from_numpy(random_logits(np.random.default_rng(1), "excluded", (6, vocab_size)))
    assert_device_equals_reference(logits, random_edits(vocab_size, 6, vocab_size), 6)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [4095, 4097])
@pytest.mark.parametrize("dtype", LOGIT_TYPES)
def test_device_types(dtype: torch.dtype, vocab_size: int) -> None:
    logits = torch.from_numpy(random_logits(np.random.default_rng(1), "excluded", (6, vocab_size))).to(dtype)
    assert_device_equals_reference(logits, random_edits(vocab_size, 6, vocab_size), 6)


@pytest.mark.gpu
def test_device_flags_and_nothing_to_do() -> None:
    assert_device_equals_reference(FLAG_ROWS, FLAG_EDITS, 5)
    assert_device_equals_reference(FLAG_ROWS, LogitEdits(), 5)


@pytest.mark.gpu
def test_device_reads_rows_by_index() -> None:
    logits, edits = torch.randn(9, 5000, device="cuda"), to_device(random_edits(2, 6, 5000))
    index = torch.tensor([8, 0, 0, 3, 5, 1], dtype=torch.int32, device="cuda")
    out, flags = torch.zeros(6, 5000, dtype=torch.float64, device="cuda"), torch.zeros(6, dtype=torch.int32).cuda()
    logit_edit(logits, edits, out, flags, row_index=index)
    assert torch.equal(out.cpu(), by_reference(logits[index.long()].cpu(), random_edits(2, 6, 5000), 6)[0])


@pytest.mark.gpu
def test_device_renames_ids() -> None:
    table = torch.randperm(5000).to(torch.int32)
    ids = torch.randint(-5, 5010, (700,), dtype=torch.int32)
    expected, found = torch.empty_like(ids), torch.empty_like(ids).cuda()
    ref.remap_ids(ids, table, expected)
    remap_ids(ids.cuda(), table.cuda(), found)
    assert torch.equal(found.cpu(), expected)


@pytest.mark.gpu
def test_device_in_a_graph() -> None:
    logits, edits = torch.randn(6, 9000, device="cuda"), to_device(random_edits(3, 6, 9000))
    out, flags = torch.zeros(6, 9000, dtype=torch.float64, device="cuda"), torch.zeros(6, dtype=torch.int32).cuda()
    graph = captured(lambda: logit_edit(logits, edits, out, flags))
    logits.normal_()
    graph.replay()
    assert torch.equal(out.cpu(), by_reference(logits.cpu(), random_edits(3, 6, 9000), 6)[0])


@pytest.mark.gpu
def test_device_sanitizer() -> None:
    assert_device_equals_reference(torch.randn(6, 5000), random_edits(4, 6, 5000), 6)
