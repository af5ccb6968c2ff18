"""After a faulty policy: the chains name the tokens that were reported, under the sequence's own identity."""

from __future__ import annotations

import time

import pytest
from coordinator_rig import HEADROOM, OK, VOCAB, Rig

from edgellm._core.block_hash import TokenChain
from edgellm.builtin.base_endpoint import BaseEndpointPolicy
from edgellm.cache import policy_calls, quarantine
from edgellm.cache.advances import HOLD_TOKEN, OneTokenAdvances, apply_advances
from edgellm.cache.binding import Rows
from edgellm.cache.endpoints import synchronize
from edgellm.cache.policy_calls import _is_ours, charge_time, timed
from edgellm.cache.types import BlockKeyExtras, ContextCacheSequenceAdvance, Hash128
from edgellm.errors import ContractViolation, InvariantError
from edgellm.plugins import PolicyRegistration
from edgellm.testing.recount import recount


def prompt(length, seed=1):
    return [(seed * 31 + 7 * i * i + i) % VOCAB for i in range(length)]


def rig_with(policy):
    return Rig(policies=[PolicyRegistration("test", policy, lambda profile, speculative: True, 0, "test")])


class AppendsToTheChain(BaseEndpointPolicy):
    """Puts a token of its own into the chain, after a chunk (at rest) or in a decode step; fails where it says so."""

    where = "chunk"

    def on_prefill_chunk(self, request, slot):
        if self.where == "chunk":
            request.impl.chains[slot].append(1)
            raise RuntimeError("half way")
        return super().on_prefill_chunk(request, slot)

    def on_decode_completed(self, request, advances, publishable_completed_slots, common_state_lengths):
        if self.where == "decode":
            request.impl.chains[0].append(1)
            raise RuntimeError("half way")
        return super().on_decode_completed(request, advances, publishable_completed_slots, common_state_lengths)


class AppendsInDecode(AppendsToTheChain):
    where = "decode"


def same_chain(chain, tokens, extras, media):
    """Tokens and identity: every block hash, and the key under which the sequence's namespace is found."""
    expected = TokenChain(chain.page_size, extras, media)
    expected.extend(tokens)
    hashes = [chain.hash_at(i) for i in range(chain.num_blocks)]
    assert chain.token_ids().tolist() == list(tokens)
    assert hashes == [expected.hash_at(i) for i in range(expected.num_blocks)]
    return True


SALTED = BlockKeyExtras(isolation_digest=Hash128(7, 3))  # what the rig makes of salt=3
MEDIA = [None, Hash128(5, 6), Hash128(5, 7), None, None, Hash128(5, 8)]


@pytest.mark.parametrize("media", [(), MEDIA], ids=["text", "media"])
def test_a_chain_that_a_policy_lengthened_is_rebuilt_under_the_same_identity(media):
    rig = rig_with(AppendsToTheChain)
    handle = rig.container()
    other = rig.join(handle, prompt(9, 2), 1)
    assert other.status is OK
    rig.join(handle, prompt(6), 0, salt=3, per_position_media_hash=media)
    untouched = handle.impl.chains[0]
    sequence = handle.sequence(1)
    assert rig.coordinator.prepare_decode_step(handle, HEADROOM, []) is OK
    assert rig.coordinator.advance_prefill(handle, 1, 5) is OK
    assert rig.coordinator.complete_decode_step(handle, OneTokenAdvances([HOLD_TOKEN] * 2)) is OK
    assert sequence.chain is handle.impl.chains[1]
    assert (sequence.num_tokens, sequence.committed_state_length) == (6, 5)
    assert same_chain(sequence.chain, prompt(6), SALTED, media)
    assert handle.impl.chains[0] is untouched
    assert rig.coordinator.metrics().policy_failures == 1
    recount(rig.coordinator)


def test_a_lying_step_leaves_the_reported_token_under_the_same_identity():
    rig = rig_with(AppendsInDecode)
    handle = rig.container()
    rig.join(handle, prompt(7), 0, salt=3)
    assert rig.coordinator.prepare_decode_step(handle, HEADROOM, []) is OK
    assert rig.coordinator.advance_prefill(handle, 0, 7) is OK
    first = ContextCacheSequenceAdvance([20], 7)
    assert rig.coordinator.finalize_sequence_admission(handle, 0, first) is OK
    assert rig.coordinator.complete_decode_step(handle, OneTokenAdvances([HOLD_TOKEN])) is OK
    sequence = handle.sequence(0)
    assert same_chain(sequence.chain, [*prompt(7), 20], SALTED, ())
    recount(rig.coordinator)


class RaisesInDecode(BaseEndpointPolicy):
    def on_decode_completed(self, request, advances, publishable_completed_slots, common_state_lengths):
        if OneTokenAdvances([HOLD_TOKEN] * len(advances)).token_ids.tolist() != advances.token_ids.tolist():
            raise RuntimeError("a bug in a plugin")
        return super().on_decode_completed(request, advances, publishable_completed_slots, common_state_lengths)


def test_who_held_while_a_policy_raised_has_the_tokens_it_had_and_goes_on_publishing():
    rig = rig_with(RaisesInDecode)
    handle = rig.container()
    for slot in (0, 1):
        rig.join(handle, prompt(5 + slot, slot + 1), slot)
        rig.chunk(handle, slot, 5 + slot)
    held = handle.sequence(1).token_ids.tolist()
    tokens = rig.decode(handle, hold=[1])
    assert tokens[1] == HOLD_TOKEN
    assert handle.sequence(1).token_ids.tolist() == held
    assert (handle.sequence(1).num_tokens, handle.sequence(1).committed_state_length) == (7, 6)
    assert handle.impl.lengths.silenced[:2].tolist() == [True, False]
    assert (handle.sequence(0).num_tokens, handle.sequence(0).committed_state_length) == (7, 6)
    assert handle.sequence(0).token_ids.tolist()[-1] == tokens[0]


class AppliesTwice(BaseEndpointPolicy):
    def on_decode_completed(self, request, advances, publishable_completed_slots, common_state_lengths):
        status = super().on_decode_completed(request, advances, publishable_completed_slots, common_state_lengths)
        with pytest.raises(
            ContractViolation, match=r"^the advances of this step were applied before; apply them once$"
        ):
            self.apply(request, advances)
        with pytest.raises(ContractViolation, match=r"^a policy may apply only the advances that its hook was given$"):
            self.apply(request, OneTokenAdvances(advances.token_ids))
        return status


def test_a_step_is_applied_once():
    rig = rig_with(AppliesTwice)
    handle = rig.container()
    rig.join(handle, prompt(5), 0)
    rig.chunk(handle, 0, 5)
    rig.decode(handle)
    assert (handle.sequence(0).num_tokens, handle.sequence(0).committed_state_length) == (7, 6)
    assert rig.coordinator.metrics().policy_failures == 0


class ClaimsMoreInCommon(BaseEndpointPolicy):
    """Says that two more tokens of its sequence are common than were reported; not a word about the others."""

    def on_prefill_chunk(self, request, slot):
        request.impl.lengths.common[slot] += 2


def test_a_common_length_beyond_what_was_reported_is_put_back_and_charged():
    rig = rig_with(ClaimsMoreInCommon)
    handle = rig.container()
    rig.join(handle, prompt(9, 2), 1)
    rig.join(handle, prompt(9), 0)
    assert rig.coordinator.prepare_decode_step(handle, HEADROOM, []) is OK
    assert rig.coordinator.advance_prefill(handle, 1, 5) is OK
    lengths = handle.impl.lengths
    assert lengths.common[:2].tolist() == lengths.committed[:2].tolist() == lengths.proven[:2].tolist() == [0, 5]
    assert lengths.silenced[:2].tolist() == [False, True]
    assert rig.coordinator.metrics().policy_failures == 1
    assert rig.coordinator.complete_decode_step(handle, OneTokenAdvances([HOLD_TOKEN] * 2)) is OK
    recount(rig.coordinator)


class MovesTheLedger(BaseEndpointPolicy):
    """Applies its step, then moves one length of it."""

    column, by = "committed", -1

    def on_decode_completed(self, request, advances, publishable_completed_slots, common_state_lengths):
        status = super().on_decode_completed(request, advances, publishable_completed_slots, common_state_lengths)
        getattr(request.impl.lengths, self.column)[0] += self.by
        return status


@pytest.mark.parametrize(("column", "by"), [("committed", -1), ("committed", 1), ("num_tokens", 1), ("common", 1)])
def test_one_length_that_a_step_hook_moved_is_put_back_and_charged(column, by):
    rig = rig_with(type("Policy", (MovesTheLedger,), {"column": column, "by": by}))
    handle = rig.container()
    rig.join(handle, prompt(5), 0)
    assert rig.coordinator.prepare_decode_step(handle, HEADROOM, []) is OK
    assert rig.coordinator.advance_prefill(handle, 0, 5) is OK
    assert rig.coordinator.finalize_sequence_admission(handle, 0, ContextCacheSequenceAdvance([20], 5)) is OK
    assert rig.coordinator.complete_decode_step(handle, OneTokenAdvances([HOLD_TOKEN])) is OK
    assert rig.coordinator.metrics().policy_failures == 1  # a step of holds is a step too
    lengths = handle.impl.lengths
    assert (int(lengths.committed[0]), int(lengths.num_tokens[0]), int(lengths.common[0])) == (5, 6, 5)
    recount(rig.coordinator)


class MovesTheLedgerAtRest(BaseEndpointPolicy):
    """Moves one length in a hook that is given no advances."""

    column, by = "committed", 1

    def on_prefill_chunk(self, request, slot):
        getattr(request.impl.lengths, self.column)[slot] += self.by


@pytest.mark.parametrize(("column", "by"), [("committed", 1), ("committed", -1), ("num_tokens", 1), ("num_tokens", -1)])
def test_one_length_that_a_hook_at_rest_moved_is_put_back_and_charged(column, by):
    rig = rig_with(type("Policy", (MovesTheLedgerAtRest,), {"column": column, "by": by}))
    handle = rig.container()
    for slot in (0, 1):
        rig.join(handle, prompt(9, slot + 1), slot)
    assert rig.coordinator.prepare_decode_step(handle, HEADROOM, []) is OK
    assert rig.coordinator.advance_prefill(handle, 1, 5) is OK
    lengths = handle.impl.lengths
    assert lengths.committed[:2].tolist() == [0, 5]
    assert lengths.num_tokens[:2].tolist() == [9, 9]
    assert lengths.silenced[:2].tolist() == [False, True]
    assert rig.coordinator.metrics().policy_failures == 1


class AppliesByOtherMeans(BaseEndpointPolicy):
    def apply(self, request, advances):
        apply_advances(request.impl, advances)


def test_a_policy_that_moves_the_ledger_rightly_by_other_means_is_not_charged():
    rig = rig_with(AppliesByOtherMeans)
    handle = rig.container()
    for slot in (0, 1):
        rig.join(handle, prompt(5 + slot, slot + 1), slot)
        rig.chunk(handle, slot, 5 + slot)
    for _ in range(4):
        rig.decode(handle, hold=[1])
    assert [sequence.num_tokens for sequence in handle.impl.sequences] == [10, 7]
    assert rig.coordinator.metrics().policy_failures == 0
    assert rig.manager.index.size == 3  # the second block of the first sequence is an answer's


def caught(call):
    try:
        call()
    except InvariantError as error:
        return error
    raise AssertionError("nothing was raised")


def test_an_invariant_error_is_ours_where_edgellm_raised_it():
    def of_a_plugin():
        raise InvariantError("a plugin's opinion")

    def of_edgellm():
        _ = Rows(None, None).table

    assert _is_ours(caught(of_edgellm)) is True
    assert _is_ours(caught(of_a_plugin)) is False
    assert _is_ours(InvariantError("never raised")) is False
    for name, expected in (
        ("edgellm", True),
        ("edgellm.cache.x", True),
        ("edgellm_eagle.policy", False),
        ("x.edgellm", False),
    ):
        namespace = {"__name__": name, "InvariantError": InvariantError}
        exec("def raising():\n    raise InvariantError('here')", namespace)
        assert _is_ours(caught(namespace["raising"])) is expected, name
    nameless = {"InvariantError": InvariantError, "__builtins__": {}}
    exec("def raising():\n    raise InvariantError('here')", nameless)
    nameless.pop("__name__", None)
    assert _is_ours(caught(nameless["raising"])) is False


class BreaksAnInvariant(BaseEndpointPolicy):
    """Leads edgellm's own code into an invariant error, or raises one itself."""

    own = False

    def on_prefill_chunk(self, request, slot):
        if self.own:
            raise InvariantError("a plugin's opinion")
        _ = Rows(None, None).table


@pytest.mark.parametrize("own", [False, True])
def test_only_an_invariant_error_of_edgellm_itself_passes_through_a_hook(own):
    rig = rig_with(type("Policy", (BreaksAnInvariant,), {"own": own}))
    handle = rig.container()
    rig.join(handle, prompt(9), 0)
    assert rig.coordinator.prepare_decode_step(handle, HEADROOM, []) is OK
    if own:
        assert rig.coordinator.advance_prefill(handle, 0, 5) is OK
        assert rig.coordinator.metrics().policy_failures == 1
    else:
        with pytest.raises(InvariantError, match=r"^a pure recurrent deployment has no page table$"):
            rig.coordinator.advance_prefill(handle, 0, 5)
        assert rig.coordinator.metrics().policy_failures == 0


def timed_rig(deadline=0.05):
    rig = Rig(policy_deadline_seconds=deadline)
    handle = rig.container()
    for slot in (0, 1):
        rig.join(handle, prompt(5 + slot, slot + 1), slot)
    return rig, handle.impl


def test_time_is_charged_to_whom_a_hook_was_about_and_the_third_time_silences():
    rig, impl = timed_rig()
    for count in (1, 2, 3, 4):
        charge_time(rig.coordinator, impl, lambda: [1], 50_000_001)
        assert rig.coordinator.metrics().policy_deadline_overruns == count
        assert [sequence.policy_overruns for sequence in impl.sequences] == [0, count]
        assert impl.lengths.silenced[:2].tolist() == [False, count >= 3]
        assert impl.lengths.publishes[:2].tolist() == [True, count < 3]


def test_a_hook_that_takes_its_whole_deadline_is_in_time():
    rig, impl = timed_rig()
    charge_time(rig.coordinator, impl, lambda: [0, 1], 50_000_000)
    assert rig.coordinator.metrics().policy_deadline_overruns == 0
    unlimited, other = timed_rig(deadline=None)
    charge_time(unlimited.coordinator, other, lambda: [0, 1], 10**12)
    assert unlimited.coordinator.metrics().policy_deadline_overruns == 0


def test_time_in_hooks_about_nobody_is_charged_to_everybody_the_third_time():
    rig, impl = timed_rig()
    for count in (1, 2, 3):
        charge_time(rig.coordinator, impl, list, 10**9)
        assert [sequence.policy_overruns for sequence in impl.sequences] == [int(count == 3)] * 2


def test_what_slow_hooks_lead_to_is_warned_about_once_with_whom_and_the_remedy(caplog):
    caplog.set_level("INFO", "edgellm")
    rig, impl = timed_rig()
    for milliseconds in (61.5, 80.25, 55, 70):
        charge_time(rig.coordinator, impl, lambda: [1], int(milliseconds * 1e6))
    assert rig.coordinator.metrics().slowest_policy_nanoseconds == 80_250_000
    lines = [record for record in caplog.records if record.name == "edgellm.cache.policy_calls"]
    told = [(record.levelname, record.getMessage()) for record in lines]
    slow = "publication policy 'base-endpoint' took {} ms, the deadline is 50.0"
    warning = (
        "publication policy 'base-endpoint' was slower than its deadline of 50.0 ms for the third time (55.0 ms): the "
        "sequence in slot 1 (a prompt of 6 tokens) goes on, but its state is kept for no later prompt; make its hooks "
        "faster, or raise policy_deadline_seconds; on a machine that is merely busy, run less beside it"
    )
    assert told == [
        ("INFO", slow.format("61.5")),
        ("INFO", slow.format("80.2")),
        ("INFO", slow.format("55.0")),
        ("WARNING", warning),
        ("INFO", slow.format("70.0")),
    ]


class Clock:
    """Stands still but where it is told to go on."""

    now = 0

    def perf_counter_ns(self):
        return self.now

    def pass_by(self, nanoseconds):
        self.now += nanoseconds
        return True


def test_what_a_hook_waits_for_the_device_is_not_the_policys_time(monkeypatch):
    rig, impl = timed_rig()
    clock = Clock()
    for module in (policy_calls, quarantine):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(rig.coordinator._quarantine, "_synchronizer", lambda stream: clock.pass_by(50_000_000))

    def hook(policy):
        clock.pass_by(2_000_000)
        status = synchronize(rig.coordinator, impl)
        clock.pass_by(1_000_000)
        return status

    assert timed(rig.coordinator, impl, impl.policy, hook) == (OK, None, 3_000_000)
    assert clock.now == 53_000_000


def test_the_time_of_a_hook_is_what_it_took():
    rig, impl = timed_rig()
    answer, fault, elapsed = timed(rig.coordinator, impl, impl.policy, lambda policy: time.sleep(0.01) or policy.name)
    assert (answer, fault) == ("base-endpoint", None)
    assert 10_000_000 <= elapsed < 10**10
    answer, fault, elapsed = timed(rig.coordinator, impl, impl.policy, lambda policy: [][1])
    assert answer is None
    assert "IndexError" in fault
    assert 0 <= elapsed < 10**10
