"""Each deliberately broken policy is failed by exactly the test of the promise it breaks, and the message says so."""

from __future__ import annotations

import broken
import pytest
from suite_runner import ATTENTION, EAGLE, HYBRID, failures

from edgellm.builtin.base_endpoint import BaseEndpointPolicy
from edgellm.cache.policy import LedgerOnlyPolicy
from edgellm.testing.conformance import PolicyConformance

EARLY_IN_TRAFFIC = {"test_traffic_publishes_nothing_early"}
EARLY = {"test_publishes_nothing_early", "test_traffic_publishes_nothing_early"}
BEYOND = {
    "test_publishes_nothing_beyond_the_common_length",
    "test_traffic_publishes_nothing_beyond_the_common_length",
}
COMMIT = {"test_keeps_the_commit_policy", "test_traffic_keeps_what_requests_want"}
BYPASS = {"test_keeps_lookup_bypass", "test_traffic_keeps_what_requests_want"}
LEAK = {
    "test_gives_everything_back_after_a_normal_end",
    "test_gives_everything_back_after_a_cancel_at_each_stage",
    "test_gives_everything_back_after_a_failed_drain",
    "test_traffic_gives_everything_back",
}
LEAK_AT_THE_END = {"test_gives_everything_back_after_a_normal_end", "test_traffic_gives_everything_back"}
PROGRESS = {"test_moves_the_ledger_by_what_ran", "test_traffic_moves_the_ledger_by_what_ran"}
HOLDS = {"test_leaves_holding_sequences_alone", "test_traffic_moves_the_ledger_by_what_ran"}
RAISES = {"test_raises_nothing", "test_traffic_raises_nothing"}
STATUS = {"test_tells_the_truth_about_its_status", "test_traffic_raises_nothing"}
TEXT = {"test_text_equals_the_solo_twin"}

# policy, deployment, the tests that must fail, words that must be in a message
TABLE = [
    (broken.PublishesThePromptAtItsFirstChunk, ATTENTION, EARLY, "publishes state only once it is complete"),
    (broken.PublishesBeforeTheDraftIsProven, EAGLE, RAISES, "is not proven complete"),
    (
        broken.PublishesBatchesBeforeTheDraftIsProven,
        EAGLE,
        {"test_traffic_publishes_nothing_early"},
        "on_prefill_finalized: slot 0: 9 tokens were published when 0 were complete",
    ),
    (broken.PublishesCheckpointsBeforeTheWait, HYBRID, EARLY_IN_TRAFFIC, "its copy not waited for"),
    (broken.KeepsALease, ATTENTION, LEAK, "are still leased when nobody is alive"),
    (broken.KeepsAReservation, HYBRID, LEAK, "snapshots are held between steps"),
    (broken.ForgetsWhatItReserved, HYBRID, LEAK_AT_THE_END, "neither published nor given back"),
    (broken.SkipsProgress, ATTENTION, PROGRESS, "is what ran"),
    (broken.LeavesTheStepOpen, ATTENTION, PROGRESS, "not marked as resolved"),
    (broken.MovesThoseWhoHeld, ATTENTION, HOLDS, "leaves a sequence that held alone"),
    (broken.PublishesTheLookahead, ATTENTION, BEYOND, "the committed length is"),
    (broken.PublishesBeyondCommon, EAGLE, BEYOND | TEXT, "the common length is"),
    (broken.IgnoresTheCommitPolicy, ATTENTION, COMMIT, "under PREFILL_STATE_ONLY"),
    (broken.IgnoresBypass, ATTENTION, BYPASS, "bypass"),
    (broken.Raises, ATTENTION, RAISES, "ZeroDivisionError: hit rate of nothing"),
    (broken.RaisesHalfWay, ATTENTION, RAISES, "it raised KeyError"),
    (broken.ReturnsNonsense, ATTENTION, RAISES, "it returned 'fine'"),
    (broken.AnswersWhereNobodyAsked, ATTENTION, RAISES, "it returned True; this hook returns nothing"),
    (broken.ClaimsPoison, ATTENTION, STATUS, "claimed POISONED"),
    (broken.Dawdles, ATTENTION, {"test_finishes_within_the_deadline"}, "took longer than"),
    (broken.FindsNothing, ATTENTION, {"test_a_complete_prompt_is_found_again"}, "0 of 16 tokens"),
]


@pytest.mark.parametrize(
    ("policy", "profile", "expected", "words"), TABLE, ids=lambda value: getattr(value, "__name__", "")
)
def test_a_broken_policy_fails_exactly_the_test_of_the_promise_it_breaks(policy, profile, expected, words):
    publishes_generated = policy in (broken.KeepsALease, broken.KeepsAReservation)
    failed = failures(
        policy,
        profile,
        speculative=profile.is_speculative,
        publishes_generated=publishes_generated,
    )
    assert failed.keys() == expected, failed
    assert any(words in message for message in failed.values()), failed


def test_the_policy_they_are_made_of_passes():
    assert failures(BaseEndpointPolicy) == {}


def test_a_policy_that_publishes_nothing_and_says_so_passes():
    assert failures(LedgerOnlyPolicy, publishes_prompts=False, publishes_generated=False) == {}


def test_a_function_that_builds_the_policy_serves_as_well():
    assert failures(lambda coordinator: BaseEndpointPolicy(coordinator)) == {}


def test_a_suite_without_a_policy_says_what_is_missing():
    with pytest.raises(AssertionError, match="set policy = YourPolicy"):
        PolicyConformance().test_survives_an_empty_batch()
