"""Verification on the CUDA executor with reference operators: logits, hidden rows, state, and the way back.

Everything is compared with `CpuExecutor`, step by step, over random steps as a session plans them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ragged import permuted_page_rows, ragged_batch
from tiny_model import write_tiny_llama, write_tiny_qwen_hybrid
from verify_steps import VerifyPlan, verifying

from edgellm.cache.types import BaseStateKind
from edgellm.errors import BrokenInvariantError, ContractViolation, InvalidArgumentError
from edgellm.models.device_attention import AttentionMode
from edgellm.models.device_ops import DeviceOps, reference_ops
from edgellm.models.loader import LoadedModel, load_model
from edgellm.models.step import HiddenRequest
from edgellm.runtime.batch import resources_of
from edgellm.runtime.device import CpuDevice
from edgellm.runtime.executor_cpu import CpuExecutor
from edgellm.runtime.executor_cuda import CudaExecutor, ExecutorLimits
from edgellm.runtime.kv_cache import KVCache
from edgellm.runtime.late_tokens import LateTokens
from edgellm.runtime.recurrent_state import RecurrentState, snapshot_storage
from edgellm.runtime.recurrent_state_device import DeviceRecurrentState

PAGE_SIZE, PAGES_PER_SLOT, NUM_SLOTS = 4, 12, 5
VERIFY_TOKENS = 4
VOCAB = 200
TOLERANCE = 2e-4
REQUEST = HiddenRequest(layers=(0, 2), normed=True)
KINDS = {"llama": write_tiny_llama, "hybrid": write_tiny_qwen_hybrid}


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(KINDS[request.param](tmp_path_factory.mktemp(request.param)), dtype="float32")


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(write_tiny_qwen_hybrid(tmp_path_factory.mktemp("hybrid")), dtype="float32")


@dataclass
class Bench:
    """An executor with the live state of its slots."""

    executor: Any
    state: RecurrentState | None

    def clear(self, slot: int) -> None:
        """What the cache does for a sequence that starts anew."""
        for slab in self.state.slabs if self.state is not None else ():
            slab[slot] = 0


def make_cache(model: LoadedModel) -> KVCache:
    kv_cache = KVCache.for_model(model.config, num_pages=NUM_SLOTS * PAGES_PER_SLOT, page_size=PAGE_SIZE)
    kv_cache.fill_poison()
    return kv_cache


def on_cpu(model: LoadedModel) -> Bench:
    pieces = model.config.recurrent_pieces
    state = RecurrentState(pieces, NUM_SLOTS) if pieces else None
    return Bench(CpuExecutor(model, make_cache(model), recurrent=state), state)


def on_device(
    model: LoadedModel,
    mode: AttentionMode = AttentionMode.EXACT,
    *,
    verify_tokens: int = VERIFY_TOKENS,
    ops: DeviceOps | None = None,
    **options: Any,
) -> Bench:
    limits = ExecutorLimits(
        num_slots=NUM_SLOTS, pages_per_slot=PAGES_PER_SLOT, step_tokens=16, verify_tokens=verify_tokens
    )
    ops, state = ops or reference_ops(), None
    if model.config.recurrent_pieces:
        state = DeviceRecurrentState(
            model.config.recurrent_pieces,
            NUM_SLOTS,
            device=torch.device("cpu"),
            checkpoint_rows=limits.checkpoint_rows,
            scatter=ops.scatter_state,
        )
    executor = CudaExecutor(
        model, make_cache(model), device=CpuDevice(), ops=ops, limits=limits, mode=mode, recurrent=state, **options
    )
    return Bench(executor, state)


@pytest.mark.parametrize("mode", AttentionMode)
@pytest.mark.parametrize("hidden", [False, True])
def test_random_steps_with_rewinds_are_those_of_the_cpu_executor(
    model: LoadedModel, mode: AttentionMode, hidden: bool
) -> None:
    cpu, device = on_cpu(model), on_device(model, mode)
    benches, page_rows = (cpu, device), permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=4)

    def begin(slot: int) -> None:
        for bench in benches:
            bench.clear(slot)

    plan = VerifyPlan(NUM_SLOTS, PAGE_SIZE * PAGES_PER_SLOT, VERIFY_TOKENS, VOCAB, begin)
    if hidden:
        for bench in benches:
            bench.executor.request_hidden(REQUEST)
    rewound = 0
    for _ in range(24):
        rows, verified = plan.step(proposals=plan.rng.random() < 0.8)
        batch = verifying(ragged_batch(rows, page_rows), verified)
        expected, actual = cpu.executor.forward_verify(batch), device.executor.forward_verify(batch)
        torch.testing.assert_close(actual.logits, expected.logits, atol=TOLERANCE, rtol=TOLERANCE)
        assert (actual.hidden is not None) == hidden
        if hidden:
            torch.testing.assert_close(actual.hidden, expected.hidden, atol=TOLERANCE, rtol=TOLERANCE)
        slots, kept = plan.take_back(rows, verified)
        for bench in benches:
            bench.executor.rewind(slots, kept)
        rewound += len(slots)
    assert rewound > 10
    for ours, theirs in zip(slabs(device), slabs(cpu), strict=True):
        torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("pad", [False, True])
def test_beside_a_verified_row_nobody_takes_decode_attention(tmp_path: Path, pad: bool) -> None:
    """Also where a chunk without logits makes up for the verified row's: as many logits rows as sequences, or fewer."""
    model = load_model(write_tiny_llama(tmp_path, head_dim=64), dtype="float32")  # heads that the usual kernels take
    ops = reference_ops()
    taken: list[int] = []

    def decode(*arguments: Any, **named: Any) -> None:
        taken.append(1)
        ops.paged_decode(*arguments, **named)

    page_rows = permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=5)
    chunks, verified, plain = [(4, 0, [1, 2, 3, 4, 5, 6]), (3, 0, [6, 5, 4, 3, 2])], (0, 0, [7, 8]), (1, 0, [9])
    device, cpu = on_device(model, AttentionMode.SPLIT, ops=replace(ops, paged_decode=decode), pad=pad), on_cpu(model)
    for rows in ([*chunks[:1], verified, plain], [*chunks, verified, plain], [verified, plain]):
        batch = verifying(ragged_batch(rows, page_rows), [len(rows) - 2])
        kept = batch.logits_to_seq >= len(rows) - 2  # the chunks do not end their prompts
        batch.logits_index, batch.logits_to_seq = batch.logits_index[kept], batch.logits_to_seq[kept]
        expected, actual = (bench.executor.forward_verify(batch).logits for bench in (cpu, device))
        torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=TOLERANCE)
        assert not taken
    device.executor.forward_verify(ragged_batch([(1, 1, [9])], page_rows))
    assert taken


def slabs(bench: Bench) -> list[torch.Tensor]:
    return [] if bench.state is None else bench.state.slabs


def test_state_goes_back_to_the_bits_it_had(hybrid: LoadedModel) -> None:
    """What was refused leaves nothing: the live state is the checkpoint after the last kept token."""
    device = on_device(hybrid)
    page_rows = permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=5)
    device.executor.forward(ragged_batch([(3, 0, [1, 2, 3]), (1, 0, [4, 5])], page_rows))
    batch = verifying(ragged_batch([(1, 2, [9, 8, 7]), (3, 3, [5, 6, 7, 8])], page_rows), [0, 1])
    device.executor.forward_verify(batch)
    after = [slab.clone() for slab in slabs(device)]
    pieces = hybrid.config.recurrent_pieces
    kept = [device.state.checkpoint(piece.layer, piece.name).clone() for piece in pieces]  # type: ignore[union-attr]
    device.executor.rewind([3], [2])
    for slab, before, checkpoint in zip(slabs(device), after, kept, strict=True):
        assert torch.equal(slab[3], checkpoint[3 + 1])  # behind the three checkpoints of slot 1
        assert not torch.equal(slab[3], before[3])
        assert torch.equal(slab[[0, 1, 2, 4]], before[[0, 1, 2, 4]])
    device.executor.rewind([3], [1])  # the session kept less than was accepted
    assert all(torch.equal(slab[3], checkpoint[3]) for slab, checkpoint in zip(slabs(device), kept, strict=True))


def test_what_cannot_go_back_is_refused(hybrid: LoadedModel) -> None:
    device = on_device(hybrid)
    page_rows = permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=5)
    batch = verifying(ragged_batch([(1, 0, [9, 8, 7]), (3, 0, [5])], page_rows), [0])
    device.executor.forward_verify(batch)
    for slots, kept in (([1], [4]), ([1], [0]), ([3], [1]), ([1, 0], [1, 1])):
        before = [slab.clone() for slab in slabs(device)]
        with pytest.raises(BrokenInvariantError, match="is to go back to its token"):
            device.executor.rewind(slots, kept)
        assert all(map(torch.equal, slabs(device), before))


def test_padding_and_warming_up_write_no_state(hybrid: LoadedModel) -> None:
    """Also of models whose decode rows have an operator of their own."""
    for mode in AttentionMode:
        device = on_device(hybrid, mode)
        for slab in slabs(device):
            slab.normal_()
        before = [slab.clone() for slab in slabs(device)]
        assert device.executor.warm_up() > 0
        assert all(map(torch.equal, slabs(device), before))
        page_rows = permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=5)
        rows = [(4, 0, [1, 2, 3]), (2, 0, [4]), (0, 0, [5])]
        device.executor.forward_verify(verifying(ragged_batch(rows, page_rows), [0]))
        for slab, old in zip(slabs(device), before, strict=True):
            assert torch.equal(slab[[1, 3]], old[[1, 3]])
            assert not any(torch.equal(slab[slot], old[slot]) for slot in (0, 2, 4))


def test_more_checkpoints_than_were_expected_take_more_memory(hybrid: LoadedModel) -> None:
    cpu, device = on_cpu(hybrid), on_device(hybrid, verify_tokens=1)
    page_rows = permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=5)
    for count in (2, 30):
        batch = verifying(ragged_batch([(1, 0, list(range(count)))], page_rows), [0])
        for bench in (cpu, device):
            bench.clear(1)
        expected, actual = (bench.executor.forward_verify(batch).logits for bench in (cpu, device))
        torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=TOLERANCE)
        for bench in (cpu, device):
            bench.executor.rewind([1], [count - 1])
        for ours, theirs in zip(slabs(device), slabs(cpu), strict=True):
            torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=TOLERANCE)


def test_steps_of_one_bucket_run_in_the_same_memory(model: LoadedModel) -> None:
    """So that a captured step can be replayed: verifications of one bucket are bound once."""
    device = on_device(model)
    page_rows = permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=5)
    device.executor.warm_up()
    kinds = device.executor._steps.kinds
    for rows in ([(1, 0, [9, 8, 7])], [(1, 0, [9, 8, 7, 6]), (2, 0, [3, 4])], [(2, 0, [3])]):
        device.executor.forward_verify(verifying(ragged_batch(rows, page_rows), list(range(len(rows)))))
    assert device.executor._steps.kinds == kinds


def test_requested_hidden_rows_void_what_was_bound_and_warm_up_again(model: LoadedModel) -> None:
    device = on_device(model)
    device.executor.warm_up()
    device.executor.request_hidden(REQUEST)
    kinds = device.executor._steps.kinds
    assert kinds
    assert all(kind.hidden for kind in kinds)


def test_nothing_is_computed_ahead_where_it_could_not_be_dropped(model: LoadedModel) -> None:
    """Recurrent state moves on for good; and behind a verification it is not known what comes."""
    device, page_rows = on_device(model), permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=5)
    batch = ragged_batch([(1, 0, [9, 8, 7])], page_rows)
    device.executor.forward(batch)
    before = [slab.clone() for slab in slabs(device)]
    device.executor.run_ahead(batch, torch.tensor([5], dtype=torch.int32))
    assert (device.executor._ahead is None) == bool(slabs(device))
    assert all(map(torch.equal, slabs(device), before))
    wide = verifying(ragged_batch([(1, 3, [1, 2])], page_rows), [0])
    device.executor.forward_verify(wide)
    assert device.executor._ahead is None
    device.executor.run_ahead(wide, torch.tensor([5, 6], dtype=torch.int32))
    assert device.executor._ahead is None


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside a prompt"])
def test_a_step_computed_ahead_has_the_hidden_rows_that_were_requested(model: LoadedModel, beside: bool) -> None:
    device, cpu = on_device(model), on_cpu(model)
    page_rows = permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=6)
    prompts = ragged_batch([(1, 0, [9, 8, 7]), (0, 0, [4, 3])], page_rows)
    for one in (device, cpu):
        one.executor.request_hidden(HiddenRequest(normed=True))
        one.executor.forward_verify(prompts)
    device.executor.run_ahead(prompts, torch.tensor([5, 6], dtype=torch.int32), hidden=True)
    ahead = device.executor._ahead
    device.executor.ran_ahead_with([5, 6])
    rows = [(2, 0, [1, 2, 3])] if beside else []
    following = ragged_batch([*rows, (0, 2, [6]), (1, 3, [5])], page_rows)
    found, wanted = device.executor.forward_verify(following), cpu.executor.forward_verify(following)
    assert (ahead is None) == bool(slabs(device))
    torch.testing.assert_close(found.logits, wanted.logits, atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(found.hidden, wanted.hidden, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("counts", [[3, 3], [1, 3], [3, 1]])
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside a prompt"])
def test_tokens_that_only_the_device_knows_are_verified_as_any(
    model: LoadedModel, counts: list[int], beside: bool
) -> None:
    tokens = {0: [7, 8, 9], 1: [11, 12, 13]}
    page_rows = permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=8)
    found = []
    for late in (False, True):
        executor = on_device(model).executor
        executor.request_hidden(REQUEST)
        executor.forward_verify(ragged_batch([(0, 0, [1, 2]), (1, 0, [3, 4, 5])], page_rows))
        rows = [(2, 0, [9, 9, 8])] if beside else []
        drafts = [[0] * count if late else tokens[row][:count] for row, count in enumerate(counts)]
        first = len(rows)
        rows += [(0, 2, [6, *drafts[0]]), (1, 3, [7, *drafts[1]])]
        wide = verifying(ragged_batch(rows, page_rows), [first, first + 1])
        if late:
            # Chains lie as drafts leave them: a column each, whoever asked for the longest comes first; padding behind.
            order = sorted((0, 1), key=lambda row: -counts[row])
            source = torch.tensor([[tokens[row][place] for row in order] + [99, 99] for place in range(3)])
            columns = [order.index(row) for row in (0, 1)]
            wide.late_tokens = LateTokens(source.int(), [first, first + 1], columns, counts)
        found.append(executor.forward_verify(wide))
    assert torch.equal(found[0].logits, found[1].logits)
    assert torch.equal(found[0].hidden, found[1].hidden)


def test_a_step_computed_ahead_without_hidden_rows_is_not_taken_for_one_with_them(model: LoadedModel) -> None:
    device, page_rows = on_device(model), permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=7)
    device.executor.request_hidden(HiddenRequest(normed=True))
    batch = ragged_batch([(1, 0, [9, 8, 7])], page_rows)
    device.executor.forward_verify(batch)
    device.executor.run_ahead(batch, torch.tensor([5], dtype=torch.int32))
    device.executor.ran_ahead_with([5])
    found = device.executor.forward_verify(ragged_batch([(1, 3, [5])], page_rows))
    assert found.hidden is not None
    assert len(found.hidden) == 1


def test_resources_name_the_state_and_where_it_is_kept(hybrid: LoadedModel) -> None:
    limits = ExecutorLimits(num_slots=2, pages_per_slot=4, step_tokens=8)
    ops, kv_cache = reference_ops(), make_cache(hybrid)
    state = DeviceRecurrentState(
        hybrid.config.recurrent_pieces, 2, device=torch.device("cpu"), scatter=ops.scatter_state
    )
    snapshots = snapshot_storage(
        state, kv_cache, None, num_slots=3, page_size=PAGE_SIZE, hidden_width=0, hidden_dtype=hybrid.dtype
    )
    executor = CudaExecutor(
        hybrid,
        kv_cache,
        device=CpuDevice(),
        ops=ops,
        limits=limits,
        mode=AttentionMode.EXACT,
        recurrent=state,
        snapshots=snapshots,
    )
    found = resources_of(executor)
    assert found.base_state_kind is BaseStateKind.HYBRID
    assert found.snapshot_storage is snapshots
    state.slabs[0][1] = 3.0
    snapshots.capture_recurrent(2, 1)
    snapshots.zero_recurrent(1)
    assert not state.slabs[0][1].any()
    snapshots.restore_recurrent(2, 1)
    assert (state.slabs[0][1] == 3.0).all()


def test_state_of_another_model_is_refused(model: LoadedModel) -> None:
    limits = ExecutorLimits(num_slots=2, pages_per_slot=4, step_tokens=8)
    state: Any = None
    if not model.config.recurrent_pieces:
        state = DeviceRecurrentState((), 2, device=torch.device("cpu"), scatter=reference_ops().scatter_state)
    with pytest.raises(InvalidArgumentError, match="pieces of recurrent state"):
        CudaExecutor(
            model,
            make_cache(model),
            device=CpuDevice(),
            ops=reference_ops(),
            limits=limits,
            mode=AttentionMode.EXACT,
            recurrent=state,
        )


def test_recurrent_state_does_not_branch(hybrid: LoadedModel) -> None:
    device = on_device(hybrid)
    batch = ragged_batch([(1, 0, [9, 8])], permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=5))
    batch.tree_mask = np.array([[1], [3]], np.int32)
    for forward in (device.executor.forward, device.executor.forward_verify):
        with pytest.raises(ContractViolation, match="trees branch, and recurrent state does not"):
            forward(batch)
