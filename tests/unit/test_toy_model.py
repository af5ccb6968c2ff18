"""The toy model of every flavour: paged, chunked and packed runs equal the solo twin, and half a rollback shows."""

from __future__ import annotations

import random

import numpy as np
import pytest

from edgellm._core.page_ledger import ResourcePools
from edgellm.cache.types import (
    BaseStateKind,
    ContextCacheDeploymentProfile,
    DeploymentConfig,
    ResourceDemand,
    ReuseReport,
    ReuseStopReason,
    SpecReuseContract,
)
from edgellm.errors import InvalidArgumentError, InvariantError
from edgellm.session.types import ResidentRef
from edgellm.testing.toy import CANARY, PoisonReadError, ToyKVCache, toy_generate
from edgellm.testing.toy_drafter import DraftView, ScriptedDrafter, StateDrafter, TruthTeller
from edgellm.testing.toy_machine import Row, ToyMachine
from edgellm.testing.toy_model import RecurrentState, SoloRun, ToyModel, draft_entry, solo_run
from edgellm.testing.toy_sequence import (
    ToySequence,
    check_state,
    checkpoint_fingerprint,
    solo_fingerprint,
    state_fingerprint,
)

PAGE = 4
EAGLE = SpecReuseContract(owns_paged_spec_state=True, future_dependency_tokens=1)
MODELS = {
    "attention": ToyModel(),
    "recurrent": ToyModel(has_attention=False, has_recurrent=True),
    "hybrid": ToyModel(has_recurrent=True),
}


def tokens(seed, count):
    return random.Random(seed).choices(range(1000), k=count)


def machine_of(model, *, contract=None, recurrent_slots=3, partial_slots=3):
    kinds = {(True, False): "attention_only", (False, True): "pure_recurrent", (True, True): "hybrid"}
    kind = BaseStateKind(kinds[model.has_attention, model.has_recurrent])
    deployment = DeploymentConfig(3, 32, 32, PAGE, 20, num_draft_pages=20 if contract else 0)
    profile = ContextCacheDeploymentProfile(kind, contract)
    machine = ToyMachine(profile, deployment, model, recurrent_slots=recurrent_slots, partial_slots=partial_slots)
    for slot in range(3):
        machine.base_table.set_rows([(slot, [slot + 3 * block for block in (5, 0, 3, 1, 4)])])
        if machine.draft_table is not None:
            machine.draft_table.set_rows([(slot, [slot + 3 * block for block in (1, 4, 0, 5, 2)])])
        if machine.storage is not None:
            machine.storage.zero_recurrent(slot)
    return machine


def sequence_at(machine, prompt, slot=0, *, committed, drafted=0):
    report = ReuseReport(len(prompt), 0, 0, ReuseStopReason.NO_RECORD, 0)
    twin = SoloRun(machine.model, prompt)
    return ToySequence(1, ResidentRef(slot, 1), tuple(prompt), twin, committed, drafted, report)


@pytest.fixture(params=MODELS.values(), ids=MODELS.keys())
def model(request):
    return request.param


def test_the_attention_twin_is_the_one_of_the_executor():
    assert solo_run([1, 2, 3], 6, ToyModel(vocab_size=97)) == toy_generate([1, 2, 3], 6, 97) == [27, 5, 17, 27, 9, 56]


def test_known_values_do_not_drift():
    assert solo_run([1, 2, 3], 3, MODELS["hybrid"]) == [28341, 12633, 880]
    assert solo_run([1, 2, 3], 3, MODELS["recurrent"]) == [9674, 48940, 24379]


def test_every_earlier_token_changes_the_text(model):
    base = tokens(1, 12)
    expected = solo_run(base, 3, model)
    for place in range(12):
        changed = list(base)
        changed[place] += 1
        assert solo_run(changed, 3, model)[0] != expected[0]


@pytest.mark.parametrize("chunk", [1, 3, 4, 11])
def test_paged_and_chunked_equals_solo(model, chunk):
    machine, prompt, twin = machine_of(model), tokens(2, 11), SoloRun(model)
    for past in range(0, 11, chunk):
        (result,) = machine.forward([Row(1, past, tuple(prompt[past : past + chunk]))])
        for offset, token_id in enumerate(prompt[past : past + chunk]):
            twin.append(token_id)
            assert result.next_tokens[offset] == twin.next_token()
            assert result.hiddens[offset] == twin.hiddens[-1]
            assert result.recurrents[offset] == twin.recurrents[-1]
    assert machine.tokens_computed == 11


def test_packed_rows_equal_solo_runs_in_every_order(model):
    prompts = [tokens(seed, length) for seed, length in ((3, 5), (4, 11), (5, 16))]
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        machine = machine_of(model)
        results = machine.forward([Row(slot, 0, tuple(prompts[slot])) for slot in order])
        assert [result.next_tokens[-1] for result in results] == [solo_run(prompts[s], 1, model)[0] for s in order]
        for slot in order:
            check_state(machine, sequence_at(machine, prompts[slot], slot, committed=len(prompts[slot])))


def test_the_window_and_the_running_value_both_matter():
    state = SoloRun(MODELS["recurrent"], tokens(6, 9)).recurrents[-1]
    shifted = RecurrentState(state.value, (0, *state.window[1:]))
    other = RecurrentState(state.value ^ 1, state.window)
    after = [s.after(5, 9) for s in (state, shifted, other)]
    assert after[0].window == after[1].window
    assert len({s.value for s in after}) == 3
    assert len({s.folded() for s in (state, shifted, other)}) == 3


def test_a_draft_entry_depends_on_hidden_row_successor_place_and_parent():
    entries = {
        draft_entry((1, 2), 7, 3, 9),
        draft_entry((1, 3), 7, 3, 9),
        draft_entry((2, 2), 7, 3, 9),
        draft_entry((1, 2), 8, 3, 9),
        draft_entry((1, 2), 7, 4, 9),
        draft_entry((1, 2), 7, 3, 10),
        draft_entry((1, 2), 7, 3, None),
    }
    assert len(entries) == 7
    one, two = SoloRun(ToyModel(), [*tokens(7, 8), 1]), SoloRun(ToyModel(), [*tokens(7, 8), 2])
    assert one.drafts[:-1] == two.drafts[:-1]
    assert one.drafts[-1] != two.drafts[-1]


def test_the_machine_writes_the_twins_draft_entries_in_any_pieces():
    machine, prompt = machine_of(MODELS["attention"], contract=EAGLE), tokens(8, 10)
    twin = SoloRun(machine.model, prompt)
    for start, end in ((0, 3), (3, 4), (4, 9)):
        machine.write_draft(1, start, twin.hiddens[start:end], prompt[start + 1 : end + 1])
    assert machine.draft_state(1, 9).tolist() == twin.drafts
    with pytest.raises(PoisonReadError):
        machine.draft_state(1, 10)


def test_half_a_rollback_is_noticed():
    """What the cases about rollback rely on: the window, the value, a page or a draft entry alone is enough."""
    model = MODELS["hybrid"]
    machine, prompt = machine_of(model, contract=EAGLE), tokens(9, 8)
    sequence = sequence_at(machine, prompt, committed=6, drafted=5)
    (result,) = machine.forward([Row(0, 0, tuple(prompt[:6]))])
    machine.write_draft(0, 0, result.hiddens[:5], prompt[1:6])
    check_state(machine, sequence)
    right = machine.recurrent_state(0)
    machine.set_recurrent_state(0, right.after(prompt[6], 6))
    with pytest.raises(InvariantError, match="recurrent state is not that of 6"):
        check_state(machine, sequence)
    machine.set_recurrent_state(0, RecurrentState(right.value, right.after(prompt[6], 6).window))
    with pytest.raises(InvariantError, match="conv window is not that of 6"):
        check_state(machine, sequence)
    machine.set_recurrent_state(0, right)
    machine.write_draft(0, 4, result.hiddens[4:5], [prompt[5] + 1])
    with pytest.raises(InvariantError, match="draft state at position 4"):
        check_state(machine, sequence)
    machine.base.pages[machine.base_row(0)[1], 1] ^= 1
    with pytest.raises(InvariantError, match="base state at position 5"):
        check_state(machine, sequence)


def test_fingerprints_are_those_of_solo_runs(model):
    machine, prompt = machine_of(model), tokens(10, 9)
    machine.forward([Row(2, 0, tuple(prompt[:7]))])
    sequence = sequence_at(machine, prompt[:8], slot=2, committed=7)
    twin = SoloRun(model, prompt)
    assert state_fingerprint(machine, sequence) == solo_fingerprint(twin, 7) != solo_fingerprint(twin, 6)
    if machine.storage is not None:
        machine.storage.capture_recurrent(1, 2)
        assert machine.storage.fingerprint(1) == checkpoint_fingerprint(twin, 7) != checkpoint_fingerprint(twin, 6)


def test_what_nobody_holds_is_poison():
    machine = machine_of(MODELS["hybrid"], contract=EAGLE)
    machine.forward([Row(0, 0, (1, 2, 3, 4, 5))])
    machine.storage.capture_recurrent(0, 0)
    machine.storage.capture_partial_kv(1, 15, 3, valid_token_count=1)
    pools = ResourcePools(ResourceDemand(20, 20, 3, 3))
    held = pools.allocate(ResourceDemand(base_kv_pages=16))
    assert held is not None
    machine.poison_unreferenced(pools, {0, 1})
    assert (machine.base.pages[16:] == CANARY).all()
    assert (machine.draft.pages == CANARY).all()
    machine.base_state(0, 5)
    machine.recurrent_state(1)
    with pytest.raises(PoisonReadError, match="slot 2 has no valid recurrent state"):
        machine.recurrent_state(2)
    machine.storage.restore_recurrent(0, 1)
    with pytest.raises(PoisonReadError, match="slot 1 has no valid recurrent state"):
        machine.recurrent_state(1)
    machine.storage.restore_partial_kv(1, 15, valid_token_count=1)
    with pytest.raises(PoisonReadError, match="position 0 of 5"):
        machine.base_state(0, 5)


def test_a_forward_poisons_what_lies_behind_the_past():
    machine = machine_of(MODELS["attention"])
    machine.forward([Row(0, 0, tuple(tokens(1, 10)))])
    machine.forward([Row(0, 5, (1,))])
    machine.base_state(0, 6)
    with pytest.raises(PoisonReadError, match="position 6 of 7"):
        machine.base_state(0, 7)


def test_whole_pages_are_copied_sources_first():
    cache = ToyKVCache(4, 2)
    cache.pages[:] = np.arange(8).reshape(4, 2)
    cache.copy_pages(np.array([0, 1], np.int32), np.array([1, 2], np.int32))
    assert cache.pages.tolist() == [[0, 1], [0, 1], [2, 3], [6, 7]]
    for sources, targets in (([0], [4]), ([-1], [0]), ([0, 1], [2])):
        with pytest.raises(InvalidArgumentError):
            cache.copy_pages(np.array(sources, np.int32), np.array(targets, np.int32))


def view(request_id, step, truth, position=10):
    return DraftView(request_id, position + step, step, truth, np.arange(5, dtype=np.uint64))


def propose_round(drafter, request_id, truths, position=10):
    return [drafter.propose(view(request_id, step, truth, position), 100) for step, truth in enumerate(truths)]


def test_a_scripted_drafter_goes_by_request_and_round():
    drafter = ScriptedDrafter({7: (2, 0), 8: lambda position: position % 2}, default=1, proposals={(9, 11): 55})
    assert propose_round(drafter, 7, [1, 2, 3]) == [1, 2, 4]
    assert propose_round(drafter, 8, [1, 2, 3], position=10) == [2, 3, 4]
    assert propose_round(drafter, 7, [1, 2, 3]) == [2, 3, 4]
    assert propose_round(drafter, 8, [1, 2, 3], position=11) == [1, 3, 4]
    assert propose_round(drafter, 9, [1, 2, 3]) == [1, 55, 4]
    assert propose_round(drafter, 1, [1, 2, None]) == [1, 3, 1]


def test_a_state_drafter_is_right_or_wrong_by_what_it_reads():
    drafter = StateDrafter(wrong_in_16=8)
    states = np.random.default_rng(1).integers(0, 2**63, (200, 3)).astype(np.uint64)
    right = sum(drafter.propose(DraftView(1, 5, 0, 42, state), 100) == 42 for state in states)
    assert 70 < right < 130
    assert drafter.propose(DraftView(1, 5, 0, None, states[0]), 100) == 1


def test_the_truth_ends_with_the_first_wrong_proposal():
    twin = SoloRun(ToyModel(), [1, 2, 3])
    expected = twin.continuation(3)
    teller = TruthTeller(twin)
    assert teller.truth() == expected[0]
    teller.proposed(expected[0])
    assert teller.truth() == expected[1]
    teller.proposed(expected[1] + 1)
    assert teller.truth() is None
    assert len(twin) == 3


def test_accepting_another_token_than_the_twins_is_noticed():
    machine = machine_of(MODELS["attention"])
    sequence = sequence_at(machine, [1, 2, 3], committed=3)
    expected = sequence.twin.next_token()
    sequence.accept([expected])
    assert sequence.generated == [expected]
    with pytest.raises(InvariantError, match="token 4 is 5"):
        sequence.accept([5])


def test_chunks_end_at_boundaries():
    sequence = sequence_at(machine_of(MODELS["attention"]), list(range(20)), committed=4)
    sequence.boundaries = (4, 9, 15)
    assert [sequence.chunk_end(n) for n in (3, 5, 6, 40)] == [7, 9, 9, 9]
    assert [sequence.chunk_end(n, stop_at_boundaries=False) for n in (6, 40)] == [10, 20]
