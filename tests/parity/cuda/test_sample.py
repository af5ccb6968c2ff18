"""Sampling: the reference against the host's filters, then the device against both: exact ids."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from row_ops import captured, record_launches
from sample_case import KINDS, Setting, host_choice, random_logits, random_settings, sample_rows

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cu.sample import (
    CHUNK,
    LOGIT_TYPES,
    MAX_VOCAB,
    SampleRows,
    SampleStatus,
    check_workspace,
    launch_config,
    sample,
    sample_workspace,
)
from edgellm.kernels.ref import sample as ref
from edgellm.sampling.philox import uniform

INF, NAN = float("inf"), float("nan")
VOCABS = [1, 2, 7, 31, 32, 33, 1000, 8192, 8193]
NO_WORKSPACE = torch.empty(0, dtype=torch.uint8)


def by_reference(logits: torch.Tensor, settings: list[Setting]) -> list[int]:
    token_ids = torch.full((len(settings),), 99, dtype=torch.int32)
    ref.sample(logits, sample_rows(settings), token_ids, NO_WORKSPACE)
    return token_ids.tolist()


def by_host(logits: np.ndarray, settings: list[Setting]) -> list[int]:
    return [host_choice(row, one) for row, one in zip(logits, settings, strict=True)]


# ---- the reference -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab_size", VOCABS)
def test_reference_is_the_host(vocab_size: int, kind: str) -> None:
    rng = np.random.default_rng(vocab_size)
    logits = random_logits(rng, kind, (24, vocab_size))
    settings = random_settings(rng, 24, vocab_size)
    assert by_reference(torch.from_numpy(logits), settings) == by_host(logits, settings)


@pytest.mark.parametrize("vocab_size", [49_152, 151_936])
def test_reference_is_the_host_on_whole_vocabularies(vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    logits = random_logits(rng, "ties", (4, vocab_size))
    settings = random_settings(rng, 4, vocab_size)
    assert by_reference(torch.from_numpy(logits), settings) == by_host(logits, settings)


def test_reference_draws_the_numbers_of_the_host() -> None:
    rng = np.random.default_rng(0)
    for seed, position in zip(rng.integers(2**64, size=50, dtype=np.uint64), rng.integers(2**62, size=50), strict=True):
        signed = int(np.uint64(seed).astype(np.int64))
        assert ref.uniform(signed, int(position)) == uniform(int(seed), int(position))


BAD_ROWS = torch.tensor(
    [[0.0, NAN, INF], [0.0, INF, -INF], [-INF, -INF, -INF], [-INF, 2.0, 2.0], [-NAN, 0.0, 0.0]], dtype=torch.float32
)
BAD_STATUS = [SampleStatus.NAN, SampleStatus.INFINITY, SampleStatus.NOTHING_LEFT, SampleStatus.CHOSEN, SampleStatus.NAN]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_reference_reports_rows_without_a_choice(temperature: float) -> None:
    settings = [Setting(temperature, top_k=2, top_p=0.5) for _ in BAD_ROWS]
    token_ids, status = torch.zeros(2, 5, dtype=torch.int32)
    ref.sample(BAD_ROWS, sample_rows(settings), token_ids, NO_WORKSPACE, status=status)
    assert status.tolist() == BAD_STATUS
    assert token_ids.tolist() == [-1, -2, -3, 1, -1]


def test_reference_reads_rows_by_index() -> None:
    token_ids = torch.zeros(3, dtype=torch.int32)
    index = torch.tensor([3, 0, 3], dtype=torch.int32)
    ref.sample(BAD_ROWS, None, token_ids, NO_WORKSPACE, row_index=index)
    assert token_ids.tolist() == [1, -1, 1]


# ---- the wrapper ---------------------------------------------------------------------------------------------------


def operands(
    num_rows: int = 4, vocab_size: int = 10_000, **changes: torch.Tensor
) -> dict[str, torch.Tensor | SampleRows]:
    found: dict[str, torch.Tensor | SampleRows] = {
        "logits": torch.zeros(num_rows, vocab_size),
        "rows": sample_rows([Setting()] * num_rows),
        "token_ids": torch.zeros(num_rows, dtype=torch.int32),
        "workspace": torch.zeros(sample_workspace(num_rows, vocab_size), dtype=torch.uint8),
    }
    return found | changes


def test_launch_config() -> None:
    assert launch_config(1, 1).grid == (1, 1, 1)
    assert launch_config(64, 151_936).grid == (19, 64, 1)
    assert launch_config(3, CHUNK).grid == (1, 3, 1)
    assert launch_config(3, CHUNK + 1) == launch_config(3, 2 * CHUNK)


def test_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = record_launches(monkeypatch)
    sample(**operands())
    sample(**operands(), filters=False)
    sample(**operands(), draws=False)
    sample(**operands() | {"rows": None})
    sample(**operands(0))
    names = [launch.spec.name.removeprefix("sample_") for launch in launches]
    assert names == ["argmax", "filter", "draw", "argmax", "draw", "argmax", "argmax"]
    assert launches[0].key == (torch.float32,)
    assert launches[0].params["vocab"] == 10_000
    assert launches[0].params["row_bytes"] * 4 == sample_workspace(4, 10_000)
    assert launches[-1].params["temperature"] is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits": torch.zeros(4, 10_000, dtype=torch.int32)}, "logits is"),
        ({"logits": torch.zeros(10_000, 4).t()}, "logits is"),
        ({"logits": torch.zeros(4, 0)}, "logits is"),
        ({"token_ids": torch.zeros(4)}, "token_ids is"),
        ({"token_ids": torch.zeros(5, dtype=torch.int32)}, "token_ids is"),
        ({"status": torch.zeros(5, dtype=torch.int32)}, "status is"),
        ({"row_index": torch.zeros(4, dtype=torch.int64)}, "row_index is"),
        ({"row_index": torch.zeros(3, dtype=torch.int32)}, "token_ids is"),
        ({"workspace": torch.zeros(100, dtype=torch.uint8)}, "workspace has 100 bytes"),
        ({"rows": sample_rows([Setting()] * 3)}, "top_k is"),
    ],
)
def test_bad_arguments(monkeypatch: pytest.MonkeyPatch, changes: dict[str, torch.Tensor], message: str) -> None:
    launches = record_launches(monkeypatch)
    with pytest.raises(InvalidArgumentError, match=message):
        sample(**operands(**changes))
    assert not launches


def test_a_vocabulary_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    record_launches(monkeypatch)
    with pytest.raises(InvalidArgumentError, match=f"the limit is {MAX_VOCAB}"):
        sample(**operands(logits=torch.empty(1, 1).expand(1, MAX_VOCAB + 1).contiguous()))


def test_cpu_tensors_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="a CUDA tensor is needed"):
        sample(**operands())


# ---- the device ----------------------------------------------------------------------------------------------------


class Device:
    """Calls of the kernels with one workspace, as a step after another has it."""

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self.workspace = torch.zeros(sample_workspace(num_rows, vocab_size), dtype=torch.uint8, device="cuda")

    def sample(self, logits: torch.Tensor, settings: list[Setting], **options: bool) -> list[int]:
        token_ids = torch.full((len(settings),), 12345, dtype=torch.int32, device="cuda")
        sample(logits, sample_rows(settings, "cuda"), token_ids, self.workspace, **options)
        return token_ids.tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab_size", VOCABS)
def test_device_equals_host(vocab_size: int, kind: str) -> None:
    rng = np.random.default_rng(vocab_size + 1)
    device = Device(64, vocab_size)
    for _ in range(3):
        logits = random_logits(rng, kind, (64, vocab_size))
        settings = random_settings(rng, 64, vocab_size)
        assert device.sample(torch.from_numpy(logits).cuda(), settings) == by_host(logits, settings)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab_size", [49_152, 151_936])
def test_device_equals_host_on_whole_vocabularies(vocab_size: int, kind: str) -> None:
    rng = np.random.default_rng(vocab_size + 2)
    logits = random_logits(rng, kind, (16, vocab_size))
    settings = random_settings(rng, 16, vocab_size)
    assert Device(16, vocab_size).sample(torch.from_numpy(logits).cuda(), settings) == by_host(logits, settings)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", LOGIT_TYPES)
def test_device_types_strides_and_index(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(3)
    wide = torch.from_numpy(random_logits(rng, "smooth", (9, 20_000))).to(dtype).cuda()
    logits, settings = wide[:, 3:19_000], random_settings(rng, 7, 18_997)
    index = torch.tensor([8, 0, 3, 3, 1, 7, 2], dtype=torch.int32, device="cuda")
    token_ids, status = torch.zeros(2, 7, dtype=torch.int32, device="cuda")
    workspace = Device(7, 18_997).workspace
    sample(logits, sample_rows(settings, "cuda"), token_ids, workspace, status=status, row_index=index)
    assert token_ids.tolist() == by_host(logits.double().cpu().numpy()[index.tolist()], settings)
    assert status.tolist() == [0] * 7


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("dtype", LOGIT_TYPES)
def test_device_reports_rows_without_a_choice(dtype: torch.dtype, temperature: float) -> None:
    logits = torch.full((5, 20_000), -INF)
    logits[:, 15_000:15_003] = BAD_ROWS
    settings = [Setting(temperature, top_k=2, top_p=0.5) for _ in BAD_ROWS]
    token_ids, status = torch.zeros(2, 5, dtype=torch.int32, device="cuda")
    workspace = Device(5, 20_000).workspace
    sample(logits.to(dtype).cuda(), sample_rows(settings, "cuda"), token_ids, workspace, status=status)
    assert status.tolist() == BAD_STATUS
    assert token_ids.tolist() == [-1, -2, -3, 15_001, -1]


@pytest.mark.gpu
def test_device_draws_the_numbers_of_the_host() -> None:
    """Equal logits: the token is the number's place in the vocabulary."""
    rng, vocab_size = np.random.default_rng(4), 65_536
    settings = [
        Setting(seed=int(seed), position=int(position))
        for seed, position in zip(
            rng.integers(2**64, size=512, dtype=np.uint64), rng.integers(2**63, size=512), strict=True
        )
    ]
    logits = torch.zeros(1, vocab_size, device="cuda").expand(512, vocab_size).contiguous()
    expected = [int(uniform(one.seed, one.position) * vocab_size) for one in settings]
    assert Device(512, vocab_size).sample(logits, settings) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("setting", [Setting(), Setting(top_k=5), Setting(top_p=0.8), Setting(0.7, min_p=0.05)])
def test_device_draws_by_chance(setting: Setting) -> None:
    """Chi-square of 20,000 draws from twelve tokens: below the 99.99 % point of 11 degrees of freedom."""
    values = np.linspace(-1.5, 1.5, 12).astype(np.float32)
    settings = [
        Setting(setting.temperature, setting.top_k, setting.top_p, setting.min_p, seed=7, position=position)
        for position in range(20_000)
    ]
    logits = torch.from_numpy(values).cuda().expand(20_000, 12).contiguous()
    counts = np.bincount(Device(20_000, 12).sample(logits, settings), minlength=12)
    weights = np.exp((values.astype(np.float64) - values.max()) / setting.temperature)
    if setting.top_k:
        weights[: -setting.top_k] = 0.0
    if setting.top_p < 1.0:
        share = np.cumsum(weights[::-1])[::-1] / weights.sum()
        weights[: int(np.flatnonzero(share >= setting.top_p)[-1])] = 0.0
    weights[weights < setting.min_p] = 0.0
    expected = weights / weights.sum() * 20_000
    assert counts[weights == 0].sum() == 0
    assert ((counts - expected)[weights > 0] ** 2 / expected[weights > 0]).sum() < 37.4


@pytest.mark.gpu
def test_device_rows_do_not_depend_on_the_batch() -> None:
    rng = np.random.default_rng(5)
    logits = torch.from_numpy(random_logits(rng, "ties", (64, 49_152))).cuda()
    settings = random_settings(rng, 64, 49_152)
    device = Device(64, 49_152)
    together = device.sample(logits, settings)
    assert device.sample(logits, settings) == together
    order = rng.permutation(64).tolist()
    permuted = device.sample(logits[order].contiguous(), [settings[row] for row in order])
    assert permuted == [together[row] for row in order]
    for row in range(0, 64, 7):
        assert device.sample(logits[row : row + 1], settings[row : row + 1]) == together[row : row + 1]


@pytest.mark.gpu
def test_device_promises_change_nothing() -> None:
    rng = np.random.default_rng(6)
    logits = torch.from_numpy(random_logits(rng, "smooth", (8, 20_000))).cuda()
    drawn = [Setting(seed=number) for number in range(8)]
    greedy = [Setting(0.0)] * 8
    device = Device(8, 20_000)
    assert device.sample(logits, drawn, filters=False) == device.sample(logits, drawn)
    assert device.sample(logits, greedy, draws=False) == device.sample(logits, greedy) == logits.argmax(1).tolist()


@pytest.mark.gpu
def test_device_in_a_graph() -> None:
    """Replays read the arrays anew: logits, parameters and positions may change between them."""
    rng = np.random.default_rng(7)
    first, second = (random_logits(rng, "smooth", (6, 30_000)) for _ in range(2))
    settings = random_settings(rng, 6, 30_000)
    logits, rows = torch.from_numpy(first).cuda(), sample_rows(settings, "cuda")
    token_ids = torch.zeros(6, dtype=torch.int32, device="cuda")
    workspace = Device(6, 30_000).workspace
    graph = captured(lambda: sample(logits, rows, token_ids, workspace))
    for values in (first, second, first):
        logits.copy_(torch.from_numpy(values))
        rows.position.add_(1)
        graph.replay()
        for one in settings:
            one.position += 1
        assert token_ids.tolist() == by_host(values, settings)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["smooth", "flat", "ties"])
def test_device_sanitizer(kind: str) -> None:
    """A small subset for compute-sanitizer: every kernel, gathered and not."""
    rng = np.random.default_rng(8)
    logits = random_logits(rng, kind, (6, 9000))
    settings = [
        Setting(0.0),
        Setting(),
        Setting(top_k=5),
        Setting(top_p=0.9),
        Setting(10.0, 5000, 0.99),
        Setting(1e4, 0, 0.5),
    ]
    assert Device(6, 9000).sample(torch.from_numpy(logits).cuda(), settings) == by_host(logits, settings)


def test_a_workspace_elsewhere_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="workspace is on cpu; a CUDA tensor is needed"):
        check_workspace(torch.zeros(64, dtype=torch.uint8), 8)
