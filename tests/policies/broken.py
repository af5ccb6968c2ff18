"""Deliberately broken policies: each breaks one promise and keeps the others.

They reach around the helpers of their base class, which would not let them: `coordinator._manager` is private, and a
policy that touches it is wrong already.  The conformance suite must see what they do all the same.
"""

from __future__ import annotations

import time

from edgellm.builtin.base_endpoint import BaseEndpointPolicy
from edgellm.cache import snapshots
from edgellm.cache.types import ContextCacheCoordinatorStatus, ContextCacheLookupPolicy, PublicationPoint
from edgellm_eagle.policy import EagleSpecPolicy
from edgellm_hybrid.policy import HybridSnapshotPolicy

Status = ContextCacheCoordinatorStatus


def publish_around_the_helpers(policy, request, slot, length, *, make_record=False):
    """Publish `length` tokens of base (and draft) blocks without asking the ledger."""
    impl = request.impl
    if length < policy.coordinator.page_size or impl.lengths.sealed[slot]:
        return
    manager, lease = policy.coordinator._manager, impl.leases[slot]
    publish = manager.publish_spec if lease.mode.value == "spec" else manager.publish
    moved = lease.rebound_page_count, lease.rebound_draft_page_count
    publish(lease, impl.chains[slot], length, make_record=make_record)
    policy.coordinator.rows.rebind_moved(impl.sequences[slot], *moved)


# --- publishes early ---------------------------------------------------------------------------------------------


class PublishesThePromptAtItsFirstChunk(BaseEndpointPolicy):
    """The whole prompt becomes findable when its first chunk is done."""

    def on_prefill_chunk(self, request, slot):
        if request.impl.lengths.publishes[slot]:
            publish_around_the_helpers(self, request, slot, request.sequence(slot).num_tokens)


class PublishesBeforeTheDraftIsProven(EagleSpecPolicy):
    """The prompt's draft pass is still queued when its pair of pages becomes findable."""

    def on_sequence_finalized(self, request, slot):
        common = request.sequence(slot).common_state_length
        self.publish_spec_endpoint(request, slot, common, PublicationPoint.PREFILL_END)
        super().on_sequence_finalized(request, slot)


class PublishesBatchesBeforeTheDraftIsProven(EagleSpecPolicy):
    """The same for the prompts of a batch."""

    def on_prefill_finalized(self, request, advances, common_state_lengths):
        super().on_prefill_finalized(request, advances, common_state_lengths)
        for slot, sequence in enumerate(request.impl.sequences):
            publish_around_the_helpers(self, request, slot, sequence.common_state_length)


class PublishesCheckpointsBeforeTheWait(HybridSnapshotPolicy):
    """At the end of a sequence, the checkpoint's copies are enqueued and published, and nobody waits for them."""

    def capture_staged(self, request):
        for slot in range(request.num_sequences):
            snapshots.enqueue_capture(self.coordinator, request.impl, slot)
        self.mark_resolved(request)
        return Status.OK


# --- leaks -------------------------------------------------------------------------------------------------------


class KeepsALease(BaseEndpointPolicy):
    """Takes a lease of its own on every complete prompt, so that nobody evicts it, and forgets it."""

    kept: list = []  # noqa: RUF012 (a leak wants a place)

    def on_sequence_finalized(self, request, slot):
        super().on_sequence_finalized(request, slot)
        acquired = self.coordinator._manager.acquire_vanilla(request.impl.chains[slot])
        if acquired.lease is not None:
            self.kept.append(acquired.lease)


class KeepsAReservation(HybridSnapshotPolicy):
    """Reserves snapshot slots at every complete prompt and neither fills nor returns them."""

    def on_sequence_finalized(self, request, slot):
        super().on_sequence_finalized(request, slot)
        manager, lease = self.coordinator._manager, request.impl.leases[slot]
        manager.reserve_hybrid_snapshots(lease, False)


class ForgetsWhatItReserved(HybridSnapshotPolicy):
    """Reserves a checkpoint where an answer ends, and never publishes it; the coordinator takes it back."""

    def on_decode_completed(self, request, advances, publishable_completed_slots, common_state_lengths):
        self.apply(request, advances)
        for slot in publishable_completed_slots:
            committed = request.sequence(slot).committed_state_length
            self.reserve_hybrid_capture(request, slot, committed, PublicationPoint.DECODE_END)
        self.mark_resolved(request)
        return Status.OK


# --- skips progress ----------------------------------------------------------------------------------------------


class SkipsProgress(BaseEndpointPolicy):
    """Publishes no answer, and forgets that the ledger moves all the same."""

    def on_decode_completed(self, request, advances, publishable_completed_slots, common_state_lengths):
        self.mark_resolved(request)
        return Status.OK


class LeavesTheStepOpen(BaseEndpointPolicy):
    """Never says that a step's work is done."""

    def on_decode_completed(self, request, advances, publishable_completed_slots, common_state_lengths):
        self.apply(request, advances)
        return Status.OK


class MovesThoseWhoHeld(BaseEndpointPolicy):
    """Counts one token for everybody, also for a sequence that held."""

    def on_decode_completed(self, request, advances, publishable_completed_slots, common_state_lengths):
        lengths, before = request.impl.lengths, request.impl.lengths.committed.copy()
        status = super().on_decode_completed(request, advances, publishable_completed_slots, common_state_lengths)
        held = (lengths.committed == before)[: lengths.size] & lengths.finalized[: lengths.size]
        if held.any() and not held.all():
            lengths.committed[: lengths.size] += held
        return status


# --- publishes beyond --------------------------------------------------------------------------------------------


class PublishesTheLookahead(BaseEndpointPolicy):
    """Counts the sampled token as state: the block it completes becomes findable unwritten."""

    def on_decode_completed(self, request, advances, publishable_completed_slots, common_state_lengths):
        status = super().on_decode_completed(request, advances, (), common_state_lengths)
        lengths = request.impl.lengths
        for slot in range(lengths.size):
            if lengths.publishes_generated[slot] and lengths.finalized[slot]:
                publish_around_the_helpers(self, request, slot, int(lengths.num_tokens[slot]))
        return status


class PublishesBeyondCommon(EagleSpecPolicy):
    """Publishes what the base model has committed; the draft model is not there yet."""

    def on_decode_completed(self, request, advances, publishable_completed_slots, common_state_lengths):
        status = super().on_decode_completed(request, advances, (), common_state_lengths)
        lengths = request.impl.lengths
        for slot, sequence in enumerate(request.impl.sequences):
            if lengths.publishes_generated[slot] and sequence.finalized and sequence.frozen_spec_prefill_length is None:
                publish_around_the_helpers(self, request, slot, int(lengths.committed[slot]))
        return status


# --- ignores the request -----------------------------------------------------------------------------------------


class IgnoresTheCommitPolicy(BaseEndpointPolicy):
    """Publishes generated blocks of everybody who looks up."""

    def on_decode_completed(self, request, advances, publishable_completed_slots, common_state_lengths):
        status = super().on_decode_completed(request, advances, publishable_completed_slots, common_state_lengths)
        lengths = request.impl.lengths
        for slot in range(lengths.size):
            if lengths.publishes[slot] and lengths.finalized[slot]:
                publish_around_the_helpers(self, request, slot, int(lengths.committed[slot]))
        return status


class IgnoresBypass(BaseEndpointPolicy):
    """Publishes complete prompts of everybody."""

    def on_sequence_finalized(self, request, slot):
        super().on_sequence_finalized(request, slot)
        if request.sequence(slot).lookup_policy is ContextCacheLookupPolicy.BYPASS:
            publish_around_the_helpers(self, request, slot, request.sequence(slot).committed_state_length)


# --- raises, lies, dawdles ---------------------------------------------------------------------------------------


class Raises(BaseEndpointPolicy):
    """Fails when an answer grows."""

    def on_decode_completed(self, request, advances, publishable_completed_slots, common_state_lengths):
        raise ZeroDivisionError("hit rate of nothing")


class RaisesHalfWay(BaseEndpointPolicy):
    """Fails after it has moved the ledger."""

    def on_decode_completed(self, request, advances, publishable_completed_slots, common_state_lengths):
        self.apply(request, advances)
        raise KeyError("slot")


class ReturnsNonsense(BaseEndpointPolicy):
    """Does everything right and returns a word."""

    def on_decode_completed(self, request, advances, publishable_completed_slots, common_state_lengths):
        super().on_decode_completed(request, advances, publishable_completed_slots, common_state_lengths)
        return "fine"


class AnswersWhereNobodyAsked(BaseEndpointPolicy):
    """Returns something from a hook that returns nothing."""

    def on_sequence_finalized(self, request, slot):
        super().on_sequence_finalized(request, slot)
        return True


class ClaimsPoison(BaseEndpointPolicy):
    """Does everything right and claims that the device is lost."""

    def on_decode_completed(self, request, advances, publishable_completed_slots, common_state_lengths):
        super().on_decode_completed(request, advances, publishable_completed_slots, common_state_lengths)
        return Status.POISONED


class Dawdles(BaseEndpointPolicy):
    """Thinks for a while when a prompt is complete."""

    seconds = 0.08

    def on_sequence_finalized(self, request, slot):
        time.sleep(self.seconds)
        super().on_sequence_finalized(request, slot)


class FindsNothing(BaseEndpointPolicy):
    """Says that it publishes prompts, and publishes nothing at all."""

    def on_prefill_chunk(self, request, slot):
        pass

    def on_sequence_finalized(self, request, slot):
        pass

    def on_decode_completed(self, request, advances, publishable_completed_slots, common_state_lengths):
        self.apply(request, advances)
        self.mark_resolved(request)
        return Status.OK
