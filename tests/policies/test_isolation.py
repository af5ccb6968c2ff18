"""A raising, slow or lying policy harms only the sequences it was called for; nobody's text changes.

Prompts that begin with `BAIT` make the policies here misbehave.  Beside the bait runs a bystander with the same
policy, and after both a latecomer.
"""

from __future__ import annotations

import time

import pytest
from suite_runner import ATTENTION, EAGLE, HYBRID

from edgellm.builtin.base_endpoint import BaseEndpointPolicy
from edgellm.cache.advances import is_hold
from edgellm.cache.policy import LedgerOnlyPolicy
from edgellm.cache.types import (
    ContextCacheBatchAdmission,
    ContextCacheConfig,
    ContextCacheCoordinatorStatus,
    ContextCacheSequenceAdvance,
    DecodingKvHeadroom,
    PublicationPoint,
    ReuseStopReason,
)
from edgellm.errors import InvariantError
from edgellm.plugins import PolicyRegistration
from edgellm.session.types import ResidentRef
from edgellm.testing.toy_driver import ToyDriver
from edgellm.testing.toy_model import solo_run
from edgellm_eagle.policy import EagleSpecPolicy
from edgellm_hybrid.policy import HybridSnapshotPolicy

Status = ContextCacheCoordinatorStatus
PAGE = 4
BAIT = 7


def is_bait(request, slot):
    return int(request.sequence(slot).token_ids[0]) == BAIT


class RaisesInChunks(BaseEndpointPolicy):
    def on_prefill_chunk(self, request, slot):
        if is_bait(request, slot):
            raise IndexError("chunk of bait")
        super().on_prefill_chunk(request, slot)


class RaisesAtThePromptsEnd(BaseEndpointPolicy):
    def on_sequence_finalized(self, request, slot):
        if is_bait(request, slot):
            raise SystemExit(3)
        super().on_sequence_finalized(request, slot)


class OnBaitedSteps(BaseEndpointPolicy):
    """Calls `misbehave` for a step in which the bait took part."""

    def on_decode_completed(self, request, advances, publishable_completed_slots, common_state_lengths):
        arguments = (request, advances, publishable_completed_slots, common_state_lengths)
        if any(is_bait(request, slot) for slot in self.moved(request, advances)):
            return self.misbehave(*arguments)
        return super().on_decode_completed(*arguments)

    def moved(self, request, advances):
        token_ids = getattr(advances, "token_ids", None)
        if token_ids is not None:
            return [slot for slot, token_id in enumerate(token_ids) if token_id >= 0]
        return [slot for slot, advance in enumerate(advances) if not is_hold(advance)]

    def behave(self, *arguments):
        return BaseEndpointPolicy.on_decode_completed(self, *arguments)


class RaisesInBatches(BaseEndpointPolicy):
    def on_prefill_finalized(self, request, advances, common_state_lengths):
        raise LookupError("no such batch")


class RaisesInSteps(OnBaitedSteps):
    def misbehave(self, *arguments):
        raise RuntimeError("step of bait")


class RaisesHavingApplied(OnBaitedSteps):
    def misbehave(self, request, advances, *_):
        self.apply(request, advances)
        raise RuntimeError("half of it is done")


class AppliesNothing(OnBaitedSteps):
    def misbehave(self, request, *_):
        self.mark_resolved(request)
        return Status.OK


class LeavesItPending(OnBaitedSteps):
    def misbehave(self, request, advances, *_):
        self.apply(request, advances)
        return Status.OK


class MovesTooFar(OnBaitedSteps):
    """Lies about the ledger: two pages more than there are."""

    def misbehave(self, *arguments):
        status = self.behave(*arguments)
        request = arguments[0]
        for slot in range(request.num_sequences):
            if is_bait(request, slot):
                request.impl.lengths.committed[slot] += 2 * PAGE
        return status


class AnswersNonsense(OnBaitedSteps):
    def misbehave(self, *arguments):
        self.behave(*arguments)
        return ["ok"]


class ClaimsPoison(OnBaitedSteps):
    def misbehave(self, *arguments):
        self.behave(*arguments)
        return Status.POISONED


class GivesUp(OnBaitedSteps):
    def misbehave(self, *arguments):
        self.behave(*arguments)
        return Status.REQUEST_FAILED


class IsSlow(OnBaitedSteps):
    def misbehave(self, *arguments):
        time.sleep(0.06)
        return self.behave(*arguments)


class PlansNonsense(HybridSnapshotPolicy):
    def plan_checkpoints(self, context):
        return [10**9] if context.num_tokens == 2 * PAGE + 1 else super().plan_checkpoints(context)


class RaisesWhilePlanning(HybridSnapshotPolicy):
    def plan_checkpoints(self, context):
        if context.num_tokens == 2 * PAGE + 1:
            raise MemoryError("no place anywhere")
        return super().plan_checkpoints(context)


FAULTY = [
    RaisesInChunks,
    RaisesAtThePromptsEnd,
    RaisesInSteps,
    RaisesHavingApplied,
    AppliesNothing,
    LeavesItPending,
    MovesTooFar,
    AnswersNonsense,
    ClaimsPoison,
    GivesUp,
]


def driver_with(policy, *, profile=ATTENTION, deadline=None, speculative=False):
    registrations = [
        PolicyRegistration("faulty", policy, lambda profile, kind: kind == speculative, 1, "test"),
        PolicyRegistration("nothing", LedgerOnlyPolicy, lambda profile, speculative: True, 0, "test"),
    ]
    return ToyDriver(
        profile, page_size=PAGE, policies=registrations, config=ContextCacheConfig(policy_deadline_seconds=deadline)
    )


def run_apart(driver, sequence, num_tokens):
    """Steps in which nobody else takes part."""
    while len(sequence.generated) < num_tokens:
        driver.step([sequence])


def bait_and_bystander(driver):
    """Both prompts in chunks of a page, then their answers in turns; returns the sequences."""
    bait = driver.admit([BAIT, *range(100, 100 + 2 * PAGE)])
    bystander = driver.admit([8, *range(200, 200 + 2 * PAGE)])
    for sequence in (bait, bystander):
        driver.prefill(sequence, chunk=PAGE)
    for _ in range(PAGE + 1):
        driver.step([bait])
        driver.step([bystander])
    return bait, bystander


def found_by_the_next(driver, sequence):
    """Tokens that a request which continues this one reuses."""
    again = driver.admit([*sequence.tokens, 1, 2])
    reused = again.reuse.reused_tokens
    driver.cancel(again)
    return reused


def close(driver):
    assert not driver.coordinator.poisoned
    driver.close()  # requires that every pool is back at its baseline


@pytest.mark.parametrize("policy", FAULTY)
def test_a_fault_is_charged_to_its_own_sequence_and_to_nobody_else(policy):
    driver = driver_with(policy)
    bait, bystander = bait_and_bystander(driver)
    assert driver.coordinator.metrics().policy_failures == 1
    assert bait.generated == solo_run(bait.prompt, len(bait.generated), driver.model)
    assert bystander.generated == solo_run(bystander.prompt, len(bystander.generated), driver.model)
    driver.finish(bait, bystander)
    committed = len(bystander.tokens) - 1
    assert found_by_the_next(driver, bystander) == committed
    assert found_by_the_next(driver, bait) <= len(bait.prompt) + 1
    close(driver)


@pytest.mark.parametrize("policy", FAULTY)
def test_a_latecomer_gets_a_policy_that_works(policy):
    driver = driver_with(policy)
    bait, _ = bait_and_bystander(driver)
    latecomer = driver.admit([9, *range(300, 300 + 2 * PAGE)])
    driver.prefill(latecomer, chunk=PAGE)
    run_apart(driver, latecomer, PAGE)
    run_apart(driver, bait, 2 * PAGE)
    driver.finish(latecomer)
    assert found_by_the_next(driver, latecomer) == len(latecomer.tokens) - 1
    assert driver.coordinator.metrics().policy_failures == 1
    close(driver)


def test_a_fault_in_a_shared_step_is_charged_to_those_who_took_part():
    driver = driver_with(RaisesInSteps)
    bait = driver.admit([BAIT, *range(100, 100 + 2 * PAGE)])
    partner = driver.admit([8, *range(200, 200 + 2 * PAGE)])
    holder = driver.admit([9, *range(300, 300 + 2 * PAGE)])
    for sequence in (bait, partner, holder):
        driver.prefill(sequence, chunk=PAGE)
    driver.step([bait, partner])
    for sequence in (bait, partner, holder):
        run_apart(driver, sequence, PAGE + 2)
    driver.finish(bait, partner, holder)
    assert found_by_the_next(driver, holder) == len(holder.tokens) - 1
    prompt_blocks = len(partner.prompt) // PAGE * PAGE
    assert found_by_the_next(driver, partner) == prompt_blocks
    assert found_by_the_next(driver, bait) == prompt_blocks
    close(driver)


def test_a_slow_policy_is_let_off_twice_and_loses_its_own_publication_the_third_time():
    driver = driver_with(IsSlow, deadline=0.03)
    bait = driver.admit([BAIT, *range(100, 100 + 2 * PAGE)])
    bystander = driver.admit([8, *range(200, 200 + 2 * PAGE)])
    for sequence in (bait, bystander):
        driver.prefill(sequence, chunk=PAGE)
    state = driver.request.sequence(driver.index(bait))
    for overruns in (1, 2, 3):
        assert driver.request.impl.lengths.publishes[driver.index(bait)]
        driver.step([bait])
        assert state.policy_overruns == overruns
    assert not driver.request.impl.lengths.publishes[driver.index(bait)]
    assert driver.request.impl.lengths.publishes[driver.index(bystander)]
    assert driver.coordinator.metrics().policy_deadline_overruns >= 3
    assert driver.coordinator.metrics().policy_failures == 0
    run_apart(driver, bystander, PAGE + 2)
    driver.finish(bystander)
    assert found_by_the_next(driver, bystander) == len(bystander.tokens) - 1
    driver.finish(bait)
    assert bait.generated == solo_run(bait.prompt, len(bait.generated), driver.model)
    close(driver)


@pytest.mark.parametrize("policy", [PlansNonsense, RaisesWhilePlanning])
def test_a_fault_while_placing_checkpoints_costs_its_own_sequence_its_checkpoints(policy):
    driver = driver_with(policy, profile=HYBRID)
    bait = driver.admit([BAIT, *range(100, 100 + 2 * PAGE)])
    assert bait.boundaries == ()
    bystander = driver.admit([8, *range(200, 200 + 3 * PAGE)])
    assert bystander.boundaries
    for sequence in (bait, bystander):
        driver.prefill(sequence, chunk=PAGE)
        run_apart(driver, sequence, 2)
    assert driver.coordinator.metrics().policy_failures == 1
    driver.finish(bait, bystander)
    assert found_by_the_next(driver, bystander) == len(bystander.tokens) - 1
    assert found_by_the_next(driver, bait) == 0
    close(driver)


class TakesCommittedForCommon(EagleSpecPolicy):
    def on_decode_completed(self, request, advances, publishable_completed_slots, common_state_lengths):
        if is_bait(request, 0):
            self.apply(request, advances)
            self.set_common(request, None)
            self.publish_generated(request, publishable_completed_slots)
        return super().on_decode_completed(request, advances, publishable_completed_slots, common_state_lengths)


def test_a_policy_cannot_take_the_committed_length_for_the_common_one():
    driver = driver_with(TakesCommittedForCommon, profile=EAGLE, speculative=True)
    bait = driver.admit([BAIT, *range(100, 100 + 2 * PAGE)])
    driver.prefill(bait, chunk=PAGE)
    run_apart(driver, bait, 3 * PAGE)
    assert driver.coordinator.metrics().policy_failures >= 1
    state = driver.request.sequence(driver.index(bait))
    assert state.common_state_length < state.committed_state_length
    driver.finish(bait)
    bystander = driver.admit([8, *range(200, 200 + 2 * PAGE)])
    driver.prefill(bystander, chunk=PAGE)
    run_apart(driver, bystander, 2 * PAGE)
    driver.finish(bystander)
    assert found_by_the_next(driver, bystander) >= len(bystander.prompt)
    close(driver)


def test_a_fault_in_a_batch_ends_that_request_and_no_other():
    driver = driver_with(RaisesInBatches)
    bystander = driver.admit([8, *range(200, 200 + 2 * PAGE)])
    driver.prefill(bystander, chunk=PAGE)
    prompt = [BAIT, *range(100, 100 + 2 * PAGE)]
    admission = driver.admission(prompt, ResidentRef(0, 99))
    begun = driver.coordinator.begin_request(
        ContextCacheBatchAdmission([admission]), DecodingKvHeadroom(1), driver.machine.device.stream
    )
    with begun.admission.request as batch:
        assert driver.coordinator.prepare_prefill(batch) is Status.OK
        advance = ContextCacheSequenceAdvance([5], len(prompt))
        assert driver.coordinator.finalize_prefill_publication(batch, [advance]) is Status.REQUEST_FAILED
        assert batch.sequence(0).committed_state_length == len(prompt)  # the ledger is whole all the same
        assert driver.coordinator.finish(batch) is Status.OK
    run_apart(driver, bystander, PAGE + 2)
    driver.finish(bystander)
    assert found_by_the_next(driver, bystander) == len(bystander.tokens) - 1
    assert driver.coordinator.metrics().policy_failures == 1
    close(driver)


def test_a_policy_that_cannot_be_built_again_leaves_text_and_books_alone():
    built = []

    def once(coordinator):
        if len(built) == 2:  # the check at start-up, and the container's
            raise OSError("licence expired")
        built.append(RaisesInSteps(coordinator))
        return built[-1]

    driver = driver_with(once)
    bait, bystander = bait_and_bystander(driver)
    assert driver.request.impl.policy.name == "ledger-only"
    for sequence in (bait, bystander):
        assert sequence.generated == solo_run(sequence.prompt, len(sequence.generated), driver.model)
    driver.finish(bait, bystander)
    assert found_by_the_next(driver, bystander) == len(bystander.prompt) // PAGE * PAGE
    close(driver)


class WritesTheLedgerInChunks(BaseEndpointPolicy):
    """Lies with its hands: moves the committed length by itself, and publishes what nobody wrote."""

    def on_prefill_chunk(self, request, slot):
        if is_bait(request, slot):
            lengths = request.impl.lengths
            lengths.committed[slot] = lengths.common[slot] = lengths.prompt[slot]
        super().on_prefill_chunk(request, slot)


class WritesTheLedgerQuietly(BaseEndpointPolicy):
    """The same, and leaves it to others to publish."""

    def on_prefill_chunk(self, request, slot):
        super().on_prefill_chunk(request, slot)
        if is_bait(request, slot):
            lengths = request.impl.lengths
            lengths.committed[slot] = lengths.common[slot] = lengths.prompt[slot]


@pytest.mark.parametrize("policy", [WritesTheLedgerInChunks, WritesTheLedgerQuietly])
def test_a_policy_that_writes_the_ledger_publishes_nothing_that_is_not_written(policy):
    registration = PolicyRegistration("liar", policy, lambda *_: True, 10, "test")
    driver = ToyDriver(ATTENTION, page_size=PAGE, policies=[registration])
    prompt = [BAIT, *range(20, 20 + 4 * PAGE)]
    liar = driver.admit(prompt)
    driver.prefill_chunk(liar, PAGE + 1)
    found = driver.admit([*prompt, 1, 2])
    assert found.reuse.reused_tokens <= PAGE + 1
    assert driver.coordinator.metrics().policy_failures == 1
    assert liar.committed == PAGE + 1
    for sequence in (liar, found):
        driver.prefill(sequence)
    driver.step()
    driver.finish(liar, found)
    for sequence in (liar, found):
        assert sequence.generated == solo_run(sequence.prompt, len(sequence.generated), driver.model)
    driver.close()


class RaisesOurOwnError(BaseEndpointPolicy):
    """Blames the runtime: an error that only the runtime's own code may raise."""

    def on_sequence_finalized(self, request, slot):
        raise InvariantError("not yours to raise")


def test_an_invariant_error_of_the_policys_own_making_is_its_fault():
    driver = ToyDriver(ATTENTION, page_size=PAGE, policies=[registration_of(RaisesOurOwnError)])
    sequence = driver.admit([BAIT, 2, 3, 4, 5])
    driver.prefill(sequence)
    driver.step()
    assert driver.coordinator.metrics().policy_failures == 1
    assert sequence.generated == solo_run(sequence.prompt, len(sequence.generated), driver.model)
    driver.finish(sequence)
    driver.close()


class DawdlesWhereNobodyIsMeant(BaseEndpointPolicy):
    def on_terminalize(self, request):
        time.sleep(0.01)
        return super().on_terminalize(request)


def test_time_taken_for_nobody_in_particular_is_charged_to_everybody_present():
    config = ContextCacheConfig(policy_deadline_seconds=0.001)
    driver = ToyDriver(ATTENTION, page_size=PAGE, config=config, policies=[registration_of(DawdlesWhereNobodyIsMeant)])
    staying = driver.admit([BAIT, 2, 3, 4, 5])
    driver.prefill(staying)
    for number in range(2 * 3):  # each one that leaves brings a compaction, and with it the hook
        leaving = driver.admit([30 + number, 2, 3, 4, 5])
        driver.prefill(leaving)
        driver.finish(leaving)
        publishing = bool(driver.request.impl.lengths.publishes[0])
        assert publishing == (driver.coordinator.metrics().policy_deadline_overruns < 5)
    assert not publishing
    driver.finish(staying)
    driver.close()


class PublishesBeforeTheProof(EagleSpecPolicy):
    def on_sequence_finalized(self, request, slot):
        common = request.sequence(slot).common_state_length
        self.publish_spec_endpoint(request, slot, common, PublicationPoint.PREFILL_END)


def test_a_prompt_is_not_published_before_its_draft_pass_is_proven():
    driver = ToyDriver(EAGLE, speculative=True, page_size=PAGE, policies=[registration_of(PublishesBeforeTheProof)])
    sequence = driver.admit([BAIT, *range(2, 10)])
    driver.prefill(sequence)
    assert driver.coordinator.metrics().policy_failures == 1
    driver.step()
    assert sequence.generated == solo_run(sequence.prompt, len(sequence.generated), driver.model)
    driver.finish(sequence)
    driver.close()


class PromptsOnly(BaseEndpointPolicy):
    def on_decode_completed(self, request, advances, *_):
        self.apply(request, advances)
        self.mark_resolved(request)
        return Status.OK


def test_what_a_policy_kept_back_is_named_where_a_lookup_stops():
    driver = ToyDriver(ATTENTION, page_size=PAGE, policies=[registration_of(PromptsOnly)])
    first = driver.admit(range(20, 20 + 2 * PAGE))
    driver.prefill(first)
    for _ in range(2 * PAGE):
        driver.step()
    history = [*first.prompt, *first.generated]
    driver.step(finish=[first])
    second = driver.admit([*history, 3])
    assert (second.reuse.reused_tokens, second.reuse.stop_position) == (2 * PAGE, 2 * PAGE)
    assert second.reuse.stop_reason is ReuseStopReason.POLICY
    driver.prefill(second)
    driver.finish(second)
    driver.close()


def registration_of(policy):
    return PolicyRegistration("odd", policy, lambda *_: True, 10, "test")
