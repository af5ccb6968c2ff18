"""Faults of publication policies: charged to the sequences they are about, and to nobody else."""

from __future__ import annotations

import time

import pytest
from coordinator_rig import HEADROOM, OK, VOCAB, Rig

from edgellm.builtin.base_endpoint import BaseEndpointPolicy
from edgellm.cache.advances import HOLD_TOKEN, OneTokenAdvances, apply_advances, participants
from edgellm.cache.policy import PublicationPolicy
from edgellm.cache.request import Phase
from edgellm.cache.types import (
    ContextCacheConfig,
    ContextCacheCoordinatorStatus,
    ContextCacheSequenceAdvance,
    DecodingTokenStateContract,
    PublicationPoint,
)
from edgellm.errors import ContractViolation
from edgellm.plugins import PolicyRegistration
from edgellm.testing.recount import recount, require_baseline
from edgellm.testing.toy import toy_generate
from edgellm.testing.toy_batch_driver import ToyBatchDriver
from edgellm.testing.toy_driver import FLAVOURS, ToyDriver

POISONED = ContextCacheCoordinatorStatus.POISONED
REQUEST_FAILED = ContextCacheCoordinatorStatus.REQUEST_FAILED
Advance = ContextCacheSequenceAdvance


def prompt(length, seed=1):
    return [(seed * 31 + 7 * i * i + i) % VOCAB for i in range(length)]


def prompt_below(vocab, length):
    return [token % vocab for token in prompt(length)]


def rig_with(policy, **config):
    return Rig(policies=[PolicyRegistration("test", policy, lambda profile, spec: True, 0, "test")], **config)


class Misbehaving(BaseEndpointPolicy):
    """The base policy, until `where` names a hook (and `when()` agrees): then `act` happens in its place."""

    where = ""
    built = 0

    def __init__(self, coordinator):
        super().__init__(coordinator)
        type(self).built += 1

    def when(self, request, slot=None):
        return True

    def act(self, request, *args):
        raise RuntimeError("a bug in a plugin")

    def on_prefill_finalized(self, request, advances, common_state_lengths):
        if self.where == "prefill":
            return self.act(request, advances)
        return super().on_prefill_finalized(request, advances, common_state_lengths)

    def on_decode_completed(self, request, advances, publishable_completed_slots, common_state_lengths):
        if self.where == "decode" and participants(advances) and self.when(request):
            return self.act(request, advances)
        return super().on_decode_completed(request, advances, publishable_completed_slots, common_state_lengths)

    def on_prefill_chunk(self, request, slot):
        if self.where == "chunk" and self.when(request, slot):
            return self.act(request, slot)
        return super().on_prefill_chunk(request, slot)

    def on_sequence_finalized(self, request, slot):
        if self.where == "finalized" and self.when(request, slot):
            return self.act(request, slot)
        return super().on_sequence_finalized(request, slot)

    def on_terminalize(self, request):
        return self.act(request) if self.where == "terminalize" else super().on_terminalize(request)


def misbehaving(where, act=Misbehaving.act, when=Misbehaving.when):
    return type("Policy", (Misbehaving,), {"where": where, "act": act, "when": when, "built": 0})


def run_container(rig, lengths=(6, 7), steps=4):
    """Join, prefill and decode; the texts must be those of solo runs."""
    handle = rig.container()
    for slot, length in enumerate(lengths):
        assert rig.join(handle, prompt(length, slot + 1), slot).status is OK
    text = [[rig.chunk(handle, index, length)] for index, length in enumerate(lengths)]
    for _ in range(steps):
        for index, token in enumerate(rig.decode(handle)):
            text[index].append(token)
    assert text == [toy_generate(prompt(length, slot + 1), steps + 1, VOCAB) for slot, length in enumerate(lengths)]
    return handle


@pytest.mark.parametrize(("where", "failures"), [("chunk", 2), ("finalized", 2), ("decode", 1)])
def test_a_raising_policy_leaves_the_containers_text_alone(where, failures):
    rig = rig_with(misbehaving(where))
    handle = run_container(rig)
    assert rig.coordinator.metrics().policy_failures == failures
    assert [bool(off) for off in handle.impl.lengths.silenced[:2]] == [True, True]
    assert rig.coordinator.finish(handle) is OK
    require_baseline(rig.coordinator)


def test_a_fault_about_one_sequence_leaves_the_others_published_by_a_new_policy_object():
    policy = misbehaving("chunk", when=lambda self, request, slot=None: slot == 0)
    rig = rig_with(policy)
    built = policy.built
    handle = run_container(rig, steps=6)
    assert rig.coordinator.metrics().policy_failures == 1
    assert policy.built == built + 2  # the container's own, and its successor
    assert [sequence.published_full_block_count for sequence in handle.impl.sequences] == [0, 3]
    assert rig.join(handle, [*prompt(7, 2), 1], 2).prefill_start == 7  # a later joiner is unaffected
    rig.coordinator.finish(handle)
    require_baseline(rig.coordinator)


def test_a_batch_hook_is_charged_to_those_who_took_part():
    policy = misbehaving("decode", when=lambda self, request, slot=None: type(self).armed)
    policy.armed = False
    rig = rig_with(policy)
    handle = rig.container()
    for slot in range(3):
        rig.join(handle, prompt(6, slot + 1), slot)
        rig.chunk(handle, slot, 6)
    policy.armed = True
    rig.decode(handle, hold=[1])
    policy.armed = False
    assert handle.impl.lengths.silenced[:3].tolist() == [True, False, True]
    for _ in range(4):
        rig.decode(handle)
    assert [sequence.published_full_block_count for sequence in handle.impl.sequences] == [1, 2, 1]
    assert rig.coordinator.metrics().policy_failures == 1
    rig.coordinator.finish(handle)


@pytest.mark.parametrize(
    ("where", "answer"),
    [("decode", None), ("decode", "ok"), ("decode", POISONED), ("decode", REQUEST_FAILED), ("chunk", OK)],
)
def test_nonsense_and_lies_are_faults(where, answer):
    def act(self, request, *args):
        if where == "decode":
            self.apply(request, args[0])
            self.mark_resolved(request)
        return answer

    rig = rig_with(misbehaving(where, act))
    handle = run_container(rig)
    assert rig.coordinator.metrics().policy_failures == (2 if where == "chunk" else 1)
    assert not rig.coordinator.poisoned
    assert rig.coordinator.finish(handle) is OK
    require_baseline(rig.coordinator)


def lies_about_tokens(self, request, advances):
    other = [Advance([3], int(length) + 1) for length in request.impl.lengths.committed[: request.num_sequences]]
    with pytest.raises(ContractViolation, match="only the advances that its hook was given"):
        self.apply(request, other)
    apply_advances(request.impl, [Advance([3, 3, 3], other[0].committed_state_length + 2), *other[1:]])
    self.mark_resolved(request)
    return OK


def forgets_to_apply(self, request, advances):
    self.mark_resolved(request)
    return OK


def forgets_to_resolve(self, request, advances):
    self.apply(request, advances)
    return OK


def applies_twice(self, request, advances):
    self.apply(request, advances)
    self.apply(request, advances)


def raises_half_way(self, request, advances):
    request.impl.chains[0].append(advances.token_ids[0])
    raise RuntimeError("in the middle")


@pytest.mark.parametrize(
    "act", [lies_about_tokens, forgets_to_apply, forgets_to_resolve, applies_twice, raises_half_way]
)
def test_whatever_a_step_hook_does_the_ledger_is_what_the_device_holds(act):
    rig = rig_with(misbehaving("decode", act))
    handle = run_container(rig)
    recount(rig.coordinator)
    assert rig.coordinator.metrics().policy_failures == 1
    assert rig.coordinator.finish(handle) is OK
    require_baseline(rig.coordinator)


@pytest.mark.parametrize("act", [forgets_to_apply, lies_about_tokens])
def test_a_faulty_policy_ends_its_own_batch_request_only(act):
    rig = rig_with(misbehaving("decode", act))
    other = rig.begun(rig.admission(prompt(5), 3))
    request = rig.begun(rig.admission(prompt(6), 0))
    rig.prefill(request)
    rig.coordinator.prepare_decode_step(request, HEADROOM)
    assert rig.coordinator.complete_decode_step(request, OneTokenAdvances([5])) is REQUEST_FAILED
    assert request.impl.phase is Phase.FINISHING
    sequence = request.sequence(0)
    assert (sequence.num_tokens, sequence.committed_state_length, sequence.token_ids[-1]) == (8, 7, 5)
    assert rig.coordinator.finish(request) is OK
    rig.prefill(other)
    rig.coordinator.finish(other)
    require_baseline(rig.coordinator)


def test_a_forgotten_prefill_end_is_applied_though_its_committed_length_did_not_move():
    """The prompt was advanced to its end by chunks: only the look-ahead token is missing."""
    rig = rig_with(misbehaving("prefill", lambda self, request, advances: self.mark_resolved(request)))
    request = rig.begun(rig.admission(prompt(6), 0))
    rig.coordinator.prepare_prefill(request)
    (token,) = rig.forward(request, [(0, 6)])
    assert rig.coordinator.advance_prefill(request, 0, 6) is OK
    assert rig.coordinator.finalize_prefill_publication(request, [Advance([token], 6)]) is REQUEST_FAILED
    sequence = request.sequence(0)
    assert (sequence.num_tokens, sequence.committed_state_length, sequence.token_ids[-1]) == (7, 6, token)
    recount(rig.coordinator)
    rig.coordinator.finish(request)


def test_a_policy_cannot_publish_more_than_is_committed():
    seen = []

    class Greedy(BaseEndpointPolicy):
        def on_prefill_chunk(self, request, slot):
            seen.append(request.sequence(slot).committed_state_length)
            self.publish_ready_endpoint(request, slot, PublicationPoint.PREFILL_END)

        def on_sequence_finalized(self, request, slot):
            self.publish_spec_endpoint(request, slot, 12, PublicationPoint.PREFILL_END)

    rig = rig_with(Greedy)
    handle = rig.container()
    rig.join(handle, prompt(9), 0)
    rig.chunk(handle, 0, 6)
    assert seen == [6]
    assert rig.manager.index.size == 1
    rig.chunk(handle, 0, 3)
    assert rig.coordinator.metrics().policy_failures == 1  # 12 tokens are not there
    rig.coordinator.finish(handle)


def test_a_policy_cannot_end_a_sequence_that_goes_on():
    class Hasty(BaseEndpointPolicy):
        def on_sequence_finalized(self, request, slot):
            self.publish_ready_endpoint(request, slot, PublicationPoint.DECODE_END)

    rig = rig_with(Hasty)
    handle = run_container(rig)
    assert rig.coordinator.metrics().policy_failures == 2
    assert handle.impl.lengths.sealed[:2].tolist() == [False, False]
    rig.coordinator.finish(handle)


def test_a_hook_about_nobody_charges_nobody():
    class Touchy(BaseEndpointPolicy):
        def on_decode_completed(self, request, advances, publishable_completed_slots, common_state_lengths):
            if not participants(advances):
                raises_half_way(self, request, OneTokenAdvances([3]))
            return super().on_decode_completed(request, advances, publishable_completed_slots, common_state_lengths)

    rig = rig_with(Touchy)
    handle = run_container(rig)
    assert rig.coordinator.metrics().policy_failures == 2  # the step of each prompt chunk
    assert [sequence.published_full_block_count for sequence in handle.impl.sequences] == [2, 2]
    rig.coordinator.finish(handle)


def test_slow_hooks_are_counted_and_the_third_switches_publication_off():
    class Slow(BaseEndpointPolicy):
        def on_decode_completed(self, *args):
            time.sleep(0.02)
            return super().on_decode_completed(*args)

    rig = rig_with(Slow, policy_deadline_seconds=0.01)
    handle = rig.container()
    for slot in (0, 1):
        rig.join(handle, prompt(6, slot + 1), slot)
        rig.chunk(handle, slot, 6)  # its empty step is slow as well, and about nobody
    rig.decode(handle, hold=[1])
    rig.decode(handle, hold=[1])
    assert [sequence.policy_overruns for sequence in handle.impl.sequences] == [2, 0]
    assert handle.impl.lengths.publishes[0]
    rig.decode(handle, hold=[1])
    assert handle.impl.lengths.publishes[:2].tolist() == [False, True]
    metrics = rig.coordinator.metrics()
    assert (metrics.policy_deadline_overruns, metrics.policy_failures) == (5, 0)
    rig.decode(handle)
    assert rig.coordinator.finish(handle) is OK
    require_baseline(rig.coordinator)


def test_without_a_deadline_nothing_is_counted():
    class Slow(BaseEndpointPolicy):
        def on_prefill_chunk(self, request, slot):
            time.sleep(0.06)

    rig = rig_with(Slow, policy_deadline_seconds=None)
    handle = rig.container()
    rig.join(handle, prompt(6), 0)
    rig.chunk(handle, 0, 6)
    assert rig.coordinator.metrics().policy_deadline_overruns == 0
    rig.coordinator.finish(handle)


def test_a_policy_that_raises_while_finishing_still_gives_its_lease_back():
    rig = rig_with(misbehaving("terminalize"))
    request = rig.begun(rig.admission(prompt(6), 0))
    assert rig.coordinator.finish(request) is OK
    require_baseline(rig.coordinator)


def test_a_policy_that_cannot_be_built_again_leaves_the_ledger_moving():
    class Once(Misbehaving):
        where = "chunk"

        def __init__(self, coordinator):
            super().__init__(coordinator)
            if type(self).built > 2:
                raise RuntimeError("no policy today")

    Once.built = 0
    rig = rig_with(Once)
    handle = run_container(rig)
    assert handle.impl.policy.name == "ledger-only"
    Once.built = 0
    rig.retire(handle, 0, 1)
    assert handle.impl.policy.name == "base-endpoint"  # an empty container tries again
    rig.coordinator.finish(handle)


def test_an_interrupted_placement_leaves_no_joiner_behind():
    from coordinator_rig import all_policies

    from edgellm.cache.types import ContextCacheConfig
    from edgellm.testing.toy_driver import FLAVOURS, ToyDriver

    driver = ToyDriver(
        FLAVOURS["hybrid"], policies=all_policies(), config=ContextCacheConfig(policy_deadline_seconds=None)
    )

    def interrupt(context):
        raise KeyboardInterrupt

    policy = driver.request.impl.policy
    policy.plan_checkpoints = interrupt
    with pytest.raises(KeyboardInterrupt):
        driver.admit(prompt(6))
    assert driver.request.num_sequences == 0
    del policy.plan_checkpoints
    driver.prefill(driver.admit(prompt(6)))
    driver.close()


def test_the_view_offers_no_way_to_change_the_manager():
    class Curious(BaseEndpointPolicy):
        def on_prefill_chunk(self, request, slot):
            manager = self.coordinator.manager
            for attempt in (
                lambda: manager.evict_all(),
                lambda: manager.pools.base.allocate(1),
                lambda: manager.index.erase_page(0),
                lambda: manager.records.erase(1),
                lambda: manager.publish,
            ):
                with pytest.raises((ContractViolation, AttributeError)):
                    attempt()
            seen.append((manager.page_size, manager.num_live_leases, manager.pools.base.capacity))

    seen = []
    rig = rig_with(Curious)
    handle = rig.container()
    rig.join(handle, prompt(6), 0)
    rig.chunk(handle, 0, 6)
    assert seen == [(4, 1, 16)]
    assert rig.coordinator.metrics().policy_failures == 0
    rig.coordinator.finish(handle)


def test_a_step_is_applied_by_its_own_advances_only():
    rig = Rig()
    handle = rig.container()
    rig.join(handle, prompt(6), 0)
    policy = handle.impl.policy
    with pytest.raises(ContractViolation, match="only the advances"):
        policy.apply(handle, OneTokenAdvances([HOLD_TOKEN]))
    rig.coordinator.finish(handle)


def test_fully_committed_state_only_advances():
    rig = Rig()
    request = rig.begun(rig.admission(prompt(6), 0), token_state_contract=DecodingTokenStateContract.FULLY_COMMITTED)
    rig.coordinator.prepare_prefill(request)
    assert rig.coordinator.finalize_prefill_publication(request, [Advance([], 6)]) is OK
    rig.coordinator.prepare_decode_step(request, HEADROOM)
    assert rig.coordinator.complete_decode_step(request, [Advance([], 6)]) is OK
    sequence = request.sequence(0)
    assert (sequence.num_tokens, sequence.committed_state_length) == (6, 6)
    rig.coordinator.finish(request)


def test_policies_are_abstract_about_their_name_and_two_hooks():
    with pytest.raises(TypeError):
        PublicationPolicy(None)


def test_a_faulty_step_of_a_plain_batch_is_resolved_and_a_faulty_chunk_leaves_the_step_pending():
    for where, pending in (("prefill", False), ("chunk", True)):
        rig = rig_with(misbehaving(where))
        request = rig.begun(rig.admission(prompt(6), 0))
        assert rig.coordinator.prepare_prefill(request) is OK
        if where == "prefill":
            status = rig.coordinator.finalize_prefill_publication(request, [Advance([5], 6)])
        else:
            status = rig.coordinator.advance_prefill(request, 0, 4)
        assert (status, request.impl.has_pending_device_work()) == (REQUEST_FAILED, pending)
        assert rig.coordinator.metrics().policy_failures == 1
        assert rig.coordinator.finish(request) is OK
        require_baseline(rig.coordinator)


def test_a_faulty_step_of_a_speculative_batch_is_waited_for():
    """Its draft may still run."""

    class Broken(BaseEndpointPolicy):
        def on_prefill_finalized(self, request, advances, common_state_lengths):
            raise RuntimeError("a bug in a plugin")

    registration = PolicyRegistration("test", Broken, lambda profile, spec: True, 0, "test")
    driver = ToyBatchDriver(FLAVOURS["eagle"], policies=[registration], config=ContextCacheConfig())
    driver.begin(prompt_below(50, 6))
    coordinator, request = driver.coordinator, driver.request
    assert coordinator.prepare_prefill(request) is OK
    assert coordinator.finalize_prefill_publication(request, [Advance([5], 6)], [6]) is REQUEST_FAILED
    assert request.impl.has_pending_device_work() is True
    assert coordinator.finish(request) is OK
    require_baseline(coordinator)


def test_a_checkpoint_that_a_batch_policy_forgot_at_its_prompts_end_is_a_fault():
    class Forgetful(BaseEndpointPolicy):
        def on_prefill_finalized(self, request, advances, common_state_lengths):
            self.apply(request, advances)
            assert self.reserve_hybrid_capture(request, 0, 6, PublicationPoint.PREFILL_END)
            self.mark_resolved(request)

    registration = PolicyRegistration("test", Forgetful, lambda profile, spec: True, 0, "test")
    driver = ToyBatchDriver(FLAVOURS["hybrid"], policies=[registration], config=ContextCacheConfig())
    driver.begin(prompt_below(50, 6))
    coordinator, request = driver.coordinator, driver.request
    assert coordinator.prepare_prefill(request) is OK
    assert coordinator.finalize_prefill_publication(request, [Advance([5], 6)]) is REQUEST_FAILED
    assert request.impl.sequences[0].staged_hybrid_publication is None
    assert coordinator.metrics().policy_failures == 1
    assert coordinator.finish(request) is OK
    require_baseline(coordinator)


def test_a_policy_is_renewed_for_the_profile_of_the_deployment():
    seen = []

    def matches(profile, spec):
        seen.append((profile, spec))
        return profile is not None

    rig = Rig(policies=[PolicyRegistration("test", misbehaving("chunk"), matches, 0, "test")])
    handle = rig.container()
    rig.join(handle, prompt(6), 0)
    seen.clear()
    rig.chunk(handle, 0, 4)
    assert rig.coordinator.metrics().policy_failures == 1
    assert seen == [(rig.coordinator.profile, False)]
    assert handle.impl.policy.name != "ledger-only"
    rig.coordinator.finish(handle)


def test_a_policy_may_not_touch_another_request_during_its_hook():
    caught = []

    class Nosy(BaseEndpointPolicy):
        def on_prefill_chunk(self, request, slot):
            with pytest.raises(ContractViolation) as error:
                self.publish_ready_endpoint(other, 0, PublicationPoint.PREFILL_CHUNK)
            caught.append(str(error.value))

    rig = rig_with(Nosy)
    other = rig.container()
    rig.join(other, prompt(6), 0)
    handle = rig.container()
    rig.join(handle, prompt(6, 2), 1)
    rig.chunk(handle, 0, 6)
    assert len(caught) == 1
    rig.coordinator.finish(handle)
    rig.coordinator.finish(other)


def forgetful(**hooks):
    return PolicyRegistration(
        "test", type("Forgetful", (BaseEndpointPolicy,), hooks), lambda profile, spec: True, 0, "t"
    )


def publishes_nothing(self, request, slot):
    """A chunk hook for draft state, whose blocks nobody has to publish before the prompt is complete."""


def test_a_checkpoint_that_a_chunk_hook_forgot_to_publish_is_a_fault():
    def on_prefill_chunk(self, request, slot):
        length = request.sequence(slot).committed_state_length
        assert self.reserve_hybrid_capture(request, slot, length, PublicationPoint.PREFILL_CHUNK)

    registration = forgetful(on_prefill_chunk=on_prefill_chunk)
    driver = ToyDriver(FLAVOURS["hybrid"], policies=[registration], config=ContextCacheConfig())
    sequence = driver.admit(prompt_below(50, 9))
    coordinator, request = driver.coordinator, driver.request
    assert coordinator.prepare_decode_step(request, driver.headroom, []) is OK
    assert coordinator.advance_prefill(request, driver.index(sequence), 4) is OK
    assert coordinator.metrics().policy_failures == 1
    assert bool(request.impl.lengths.silenced[0]) is True
    assert request.impl.sequences[0].staged_hybrid_publication is None


def test_a_frozen_prompt_that_a_policy_forgot_to_publish_is_a_fault_once_it_is_proven():
    def on_sequence_finalized(self, request, slot):
        self.freeze_prefill(request, slot)

    def on_decode_completed(self, request, advances, publishable_completed_slots, common_state_lengths):
        self.apply(request, advances)
        self.set_common(request, common_state_lengths)
        self.mark_resolved(request)
        return OK

    registration = forgetful(
        on_prefill_chunk=publishes_nothing,
        on_sequence_finalized=on_sequence_finalized,
        on_decode_completed=on_decode_completed,
    )
    driver = ToyDriver(FLAVOURS["eagle"], policies=[registration], config=ContextCacheConfig())
    for number in (1, 2):
        driver.prefill(driver.admit([token % 50 for token in prompt(6, number)]))
    lengths, sequences = driver.request.impl.lengths, driver.request.impl.sequences
    assert [sequence.frozen_spec_prefill_length for sequence in sequences] == [6, 6]
    assert driver.coordinator.metrics().policy_failures == 0  # nobody has proven either yet
    driver.step([driver.live[2]])
    assert driver.coordinator.metrics().policy_failures == 1
    assert lengths.silenced[:2].tolist() == [False, True]
    assert [sequence.frozen_spec_prefill_length for sequence in sequences] == [6, None]
    assert driver.coordinator.finish(driver.request) is OK  # whose hook forgets the first as well
    assert driver.coordinator.metrics().policy_failures == 2


def test_a_frozen_prompt_that_a_policy_forgot_at_the_end_is_a_fault():
    def on_sequence_finalized(self, request, slot):
        self.freeze_prefill(request, slot)

    def on_terminalize(self, request):
        return OK

    registration = forgetful(
        on_prefill_chunk=publishes_nothing, on_sequence_finalized=on_sequence_finalized, on_terminalize=on_terminalize
    )
    driver = ToyDriver(FLAVOURS["eagle"], policies=[registration], config=ContextCacheConfig())
    driver.prefill(driver.admit(prompt_below(50, 6)))
    assert driver.request.impl.sequences[0].frozen_spec_prefill_length == 6
    assert driver.coordinator.finish(driver.request) is OK
    assert driver.coordinator.metrics().policy_failures == 1


def test_a_fault_in_placing_checkpoints_is_charged_to_that_request():
    seen = []

    def plan_checkpoints(self, context):
        seen.append(self.coordinator.hook_request)
        raise RuntimeError("a bug in a plugin")

    registration = forgetful(plan_checkpoints=plan_checkpoints)
    driver = ToyDriver(FLAVOURS["hybrid"], policies=[registration], config=ContextCacheConfig())
    driver.admit(prompt_below(50, 9))
    impl = driver.request.impl
    assert seen == [impl]
    assert driver.coordinator.hook_request is None
    assert (bool(impl.lengths.silenced[0]), driver.coordinator.metrics().policy_failures) == (True, 1)


def test_a_checkpoint_that_a_decode_hook_forgot_is_charged_to_its_sequence_alone():
    def on_decode_completed(self, request, advances, publishable_completed_slots, common_state_lengths):
        self.apply(request, advances)
        if participants(advances):
            assert self.reserve_hybrid_capture(request, 0, 7, PublicationPoint.DECODE_BLOCK)
        self.mark_resolved(request)
        return OK

    registration = forgetful(on_decode_completed=on_decode_completed)
    driver = ToyDriver(FLAVOURS["hybrid"], policies=[registration], config=ContextCacheConfig())
    for number in (1, 2):
        driver.prefill(driver.admit([token % 50 for token in prompt(6, number)]))
    driver.step()
    assert driver.coordinator.metrics().policy_failures == 1
    assert driver.request.impl.lengths.silenced[:2].tolist() == [True, False]
    assert driver.request.impl.sequences[0].staged_hybrid_publication is None


def test_a_plain_batch_awaits_no_draft_initialisation():
    def on_prefill_finalized(self, request, advances, common_state_lengths):
        self.apply(request, advances)
        self.begin_draft_init(request)

    rig = Rig(policies=[forgetful(on_prefill_finalized=on_prefill_finalized)])
    request = rig.begun(rig.admission(prompt(6), 0))
    assert rig.coordinator.prepare_prefill(request) is OK
    assert rig.coordinator.finalize_prefill_publication(request, [Advance([5], 6)]) is REQUEST_FAILED
    assert rig.coordinator.metrics().policy_failures == 1
    assert rig.coordinator.finish(request) is OK


def test_a_draft_initialisation_ends_with_the_first_step_of_its_batch():
    def on_prefill_finalized(self, request, advances, common_state_lengths):
        self.apply(request, advances)
        self.set_common(request, common_state_lengths)
        self.begin_draft_init(request)

    def on_decode_completed(self, request, advances, publishable_completed_slots, common_state_lengths):
        self.apply(request, advances)
        self.set_common(request, common_state_lengths)
        return OK

    registration = forgetful(on_prefill_finalized=on_prefill_finalized, on_decode_completed=on_decode_completed)
    driver = ToyBatchDriver(FLAVOURS["eagle"], policies=[registration], config=ContextCacheConfig())
    driver.begin(prompt_below(50, 6))
    coordinator, request = driver.coordinator, driver.request
    assert coordinator.prepare_prefill(request) is OK
    assert coordinator.finalize_prefill_publication(request, [Advance([5], 6)], [6]) is OK
    assert request.impl.awaiting_first_spec_completion() is True
    assert coordinator.prepare_decode_step(request, driver.headroom) is OK
    assert coordinator.complete_decode_step(request, [Advance([1, 2], 8)], (), [7]) is REQUEST_FAILED
    assert coordinator.metrics().policy_failures == 1
    assert coordinator.finish(request) is OK


def test_a_slow_hook_is_charged_to_the_sequence_it_was_about(monkeypatch):
    ticks = iter(range(0, 10**15, 2 * 10**9))
    rig = Rig(policy_deadline_seconds=1.0)
    handle = rig.container()
    for slot in (0, 1):
        rig.join(handle, prompt(6, slot + 1), slot)
    monkeypatch.setattr("edgellm.cache.policy_calls.time.perf_counter_ns", lambda: next(ticks))
    assert rig.coordinator.prepare_decode_step(handle, HEADROOM, []) is OK
    assert rig.coordinator.advance_prefill(handle, 1, 4) is OK
    assert [sequence.policy_overruns for sequence in handle.impl.sequences] == [0, 1]
    assert rig.coordinator.metrics().policy_deadline_overruns == 1


def test_a_decode_step_publishes_no_blocks_of_an_incomplete_prompt():
    registration = forgetful(on_prefill_chunk=publishes_nothing)
    rig = Rig(policies=[registration])
    handle = rig.container()
    rig.join(handle, prompt(9), 0)
    rig.join(handle, prompt(6, 2), 1)
    rig.chunk(handle, 0, 8)  # two whole blocks, and one token to come
    rig.chunk(handle, 1, 6)
    assert rig.coordinator.metrics().published_blocks == 1  # of the complete prompt
    rig.decode(handle, hold=[0])
    rig.decode(handle, hold=[0])
    assert [sequence.published_full_block_count for sequence in handle.impl.sequences] == [0, 2]
    assert rig.coordinator.metrics().policy_failures == 0
    rig.chunk(handle, 0, 1)
    assert handle.sequence(0).published_full_block_count == 2
    rig.coordinator.finish(handle)


def test_a_batch_whose_policy_was_at_fault_before_its_prompts_end_goes_on_unpublished():
    def plan_checkpoints(self, context):
        raise RuntimeError("a bug in a plugin")

    registration = forgetful(plan_checkpoints=plan_checkpoints)
    driver = ToyBatchDriver(FLAVOURS["hybrid"], policies=[registration], config=ContextCacheConfig())
    driver.begin(prompt_below(50, 6), prompt_below(50, 9))
    driver.prefill_batch()
    states = [driver.request.sequence(index) for index in (0, 1)]
    assert [(state.committed_state_length, state.num_tokens) for state in states] == [(6, 7), (9, 10)]
    assert driver.request.impl.has_pending_device_work() is False
    assert (driver.coordinator.metrics().policy_failures, driver.coordinator.metrics().published_blocks) == (2, 0)
    assert driver.request.impl.finishing() is False
    driver.step()
    driver.finish_batch()
    driver.close()


def test_where_no_policy_can_be_built_again_the_others_go_on_unpublished_and_uncharged():
    faulty = misbehaving("chunk", when=lambda self, request, slot=None: slot == 0)

    class Once(faulty):
        broken = False

        def __init__(self, coordinator):
            if type(self).broken:
                raise RuntimeError("a second time")
            super().__init__(coordinator)

    rig = rig_with(Once)
    handle = rig.container()
    for slot in (0, 1):
        rig.join(handle, prompt(6, slot + 1), slot)
    Once.broken = True
    rig.chunk(handle, 0, 6)
    assert handle.impl.policy.name == "ledger-only"
    rig.chunk(handle, 1, 6)
    for _ in range(3):
        rig.decode(handle)
    assert rig.coordinator.metrics().policy_failures == 1
    assert handle.impl.lengths.silenced[:2].tolist() == [True, False]
    assert [sequence.committed_state_length for sequence in handle.impl.sequences] == [9, 9]
    assert rig.coordinator.metrics().published_blocks == 0
    assert rig.coordinator.finish(handle) is OK
