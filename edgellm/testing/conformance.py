"""The conformance suite of publication policies: one import, and pytest collects the tests.

    class TestMyPolicy(PolicyConformance):
        policy = MyPolicy

Every test runs the policy over the integer toy model with tiny pools, watched at every hook, publication and wait.
A test judges one promise of `Promise`, so what fails says what was broken.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, ClassVar, cast

from edgellm.cache.policy import PublicationPolicy
from edgellm.cache.types import (
    ContextCacheCommitPolicy,
    ContextCacheDeploymentProfile,
    ContextCacheLookupPolicy,
)
from edgellm.testing.conformance_journal import Promise
from edgellm.testing.conformance_rig import DEADLINE_SECONDS, DRAFT_TOKENS, Rig, require
from edgellm.testing.conformance_traffic import batches, random_walk

if TYPE_CHECKING:
    from edgellm.cache.coordinator import ContextCacheCoordinator

PolicyFactory = Callable[["ContextCacheCoordinator"], PublicationPolicy]

_PREFILL_ONLY = ContextCacheCommitPolicy.PREFILL_STATE_ONLY
_WITH_ANSWERS = ContextCacheCommitPolicy.INCLUDING_GENERATED_TOKENS
_BYPASS = ContextCacheLookupPolicy.BYPASS
_WALK_SEEDS = range(4)
_WALK_STEPS = 60
_DEADLINE_TRIALS = 3

_TRAFFIC: weakref.WeakKeyDictionary[type, list[Rig]] = weakref.WeakKeyDictionary()


class PolicyConformance:
    """Subclass it in a plugin's tests, with a name that begins with `Test`.

    Attributes:
        policy: the policy class, or a function of the coordinator that returns a policy.
        profile: the deployment it is certified for; run the suite once for each that it serves.
        speculative: certify for speculative requests on that deployment.
        publishes_prompts: a complete prompt must be found by the next request.
        publishes_generated: so must an answer, unless the request says otherwise.
        page_size: tokens a page.
    """

    policy: ClassVar[PolicyFactory]
    profile: ClassVar[ContextCacheDeploymentProfile] = ContextCacheDeploymentProfile()
    speculative: ClassVar[bool] = False
    publishes_prompts: ClassVar[bool] = True
    publishes_generated: ClassVar[bool] = True
    page_size: ClassVar[int] = 4

    def rig(self, *, num_pages: int = 64, max_batch: int = 4, **options: bool) -> Rig:
        """A fresh deployment of a few pages with the policy in it; options as in `Rig`."""
        return Rig(
            self._policy(),
            self.profile,
            speculative=self.speculative,
            page_size=self.page_size,
            num_pages=num_pages,
            max_batch=max_batch,
            **{"watched": True, **options},
        )

    def _policy(self) -> PolicyFactory:
        """The class or function as it was written; a function must not be bound to the test."""
        found = inspect.getattr_static(type(self), "policy", None)
        factory = found.__func__ if isinstance(found, staticmethod) else found
        if not callable(factory):
            raise AssertionError(f"{type(self).__name__} names no policy; set policy = YourPolicy in it")
        return cast(PolicyFactory, factory)

    # --- when --------------------------------------------------------------------------------------------

    def test_publishes_nothing_early(self) -> None:
        """Chunk by chunk, with equal prompts in flight and somebody else looking up at every moment."""
        with self.rig() as rig:
            prompt = rig.prompt(5 * self.page_size + 2)
            producer = rig.admit(prompt)
            twin = rig.admit(prompt)
            while producer.prompt_remaining:
                rig.chunk(producer, self.page_size)
            for length in (self.page_size, 3 * self.page_size, len(prompt)):
                rig.generate([*prompt[:length], *rig.prompt(3)], 2)
            rig.chunk(twin, self.page_size)
            rig.finish_prompt(twin)
            rig.decode([producer, twin], steps=self.page_size + 1)
            rig.finish(producer)
            rig.finish(twin)
            rig.generate(rig.prompt(2 * self.page_size), 1)  # ends before any step could prove its draft state
        require(rig, Promise.NOTHING_EARLY)

    def test_publishes_nothing_beyond_the_common_length(self) -> None:
        """Answers of every length around two page boundaries, and the turn that continues each."""
        for extra in range(1, 2 * self.page_size + 2):
            with self.rig() as rig:
                sequence = rig.complete(rig.prompt(self.page_size + 1), extra)
                rig.finish(sequence)
                if not rig.journal.findings:
                    rig.generate([*sequence.tokens, *rig.prompt(2)], 2)
            require(rig, Promise.NOTHING_BEYOND)

    # --- what the request wants ---------------------------------------------------------------------------

    def test_keeps_the_commit_policy(self) -> None:
        with self.rig() as rig:
            private = rig.complete(rig.prompt(2 * self.page_size), 2 * self.page_size + 1, commit_policy=_PREFILL_ONLY)
            rig.finish(private)
            shared = rig.complete(rig.prompt(2 * self.page_size), 2 * self.page_size + 1, commit_policy=_WITH_ANSWERS)
            rig.finish(shared)
            rig.look()
        require(rig, Promise.COMMIT_POLICY)

    def test_keeps_lookup_bypass(self) -> None:
        with self.rig() as rig:
            prompt = rig.prompt(3 * self.page_size)
            private = rig.complete(prompt, self.page_size + 1, lookup_policy=_BYPASS)
            rig.finish(private)
            rig.look()
            if rig.known(prompt):
                rig.journal.add(Promise.BYPASS, f"{rig.known(prompt)} tokens of a bypassing request can be found")
            again = rig.complete(prompt, 2, lookup_policy=_BYPASS)
            if again.reuse.reused_tokens:
                rig.journal.add(Promise.BYPASS, f"{again.reuse.reused_tokens} tokens were reused under bypass")
            rig.finish(again)
        require(rig, Promise.BYPASS)

    def test_a_complete_prompt_is_found_again(self) -> None:
        """The positive half: a cache that is off keeps every promise above."""
        if not self.publishes_prompts:
            return
        with self.rig() as rig:
            prompt = rig.prompt(4 * self.page_size)
            sequence = rig.complete(prompt, 2)
            rig.finish(sequence)
            again = rig.admit([*prompt, *rig.prompt(2)])
            found = again.reuse.reused_tokens
            if found < 2 * self.page_size:  # a checkpoint of its ladder, at the least
                rig.journal.add(Promise.SERVES, f"{found} of {len(prompt)} tokens of a complete prompt were found")
            rig.cancel(again)
        require(rig, Promise.SERVES)

    def test_an_answer_is_found_again(self) -> None:
        if not self.publishes_generated:
            return
        with self.rig() as rig:
            sequence = rig.complete(rig.prompt(self.page_size), 4 * self.page_size)
            tokens = list(sequence.tokens)
            rig.finish(sequence)
            again = rig.admit([*tokens, *rig.prompt(2)])
            found = again.reuse.reused_tokens
            if found < 2 * self.page_size:  # a checkpoint of its ladder, at the least
                rig.journal.add(Promise.SERVES, f"{found} of {len(tokens)} tokens of a turn were found")
            rig.cancel(again)
        require(rig, Promise.SERVES)

    # --- leaks -------------------------------------------------------------------------------------------

    def test_gives_everything_back_after_a_normal_end(self) -> None:
        with self.rig() as rig:
            for length in (1, self.page_size, 2 * self.page_size + 1):
                rig.finish(rig.complete(rig.prompt(length), self.page_size + 1))
            rig.check_baseline()
        require(rig, Promise.NO_LEAK)

    def test_gives_everything_back_after_a_cancel_at_each_stage(self) -> None:
        with self.rig() as rig:
            for stage in ("admitted", "in the prompt", "after the prompt", "in the answer"):
                rig.journal.where = f"a cancel when {stage}"
                sequence = rig.admit(rig.prompt(3 * self.page_size + 1))
                if stage == "in the prompt":
                    rig.chunk(sequence, self.page_size)
                elif stage != "admitted":
                    rig.finish_prompt(sequence)
                if stage == "in the answer":
                    rig.decode([sequence], steps=self.page_size)
                rig.cancel(sequence)
                rig.check_baseline()
        require(rig, Promise.NO_LEAK)

    def test_gives_everything_back_after_a_failed_drain(self) -> None:
        """The wait at the end fails: everything is held in quarantine, and comes back by recovery."""
        with self.rig() as rig:
            rig.complete(rig.prompt(2 * self.page_size), 2)
            rig.fail_the_drain()
            rig.check_baseline()
        require(rig, Promise.NO_LEAK)

    # --- progress ----------------------------------------------------------------------------------------

    def test_moves_the_ledger_by_what_ran(self) -> None:
        for commit in (_PREFILL_ONLY, _WITH_ANSWERS):
            with self.rig() as rig:
                first = rig.complete(rig.prompt(self.page_size + 1), self.page_size, commit_policy=commit)
                second = rig.complete(rig.prompt(2 * self.page_size), 2, commit_policy=commit)
                rig.decode([first, second], steps=self.page_size)
                rig.finish(first)
                rig.finish(second)
            require(rig, Promise.PROGRESS)

    def test_five_chunks_take_five_steps(self) -> None:
        """Whatever is published, a prompt of five chunks takes five steps and the pages it covers."""
        for lookup, commit in ((None, _WITH_ANSWERS), (None, _PREFILL_ONLY), (_BYPASS, _WITH_ANSWERS)):
            with self.rig(num_pages=5 + self._headroom_pages(), max_batch=1, look_again=False) as rig:
                prompt = rig.prompt(5 * self.page_size - 1)
                sequence = rig.admit(prompt, lookup_policy=lookup, commit_policy=commit)
                pages, planned = rig.leased_pages(), rig.planned_steps(sequence, self.page_size)
                steps = rig.finish_prompt(sequence, chunk=self.page_size)
                if steps != planned:
                    rig.journal.add(Promise.CHUNKS, f"a prompt of {planned} chunks took {steps} steps")
                if rig.leased_pages() > pages:
                    rig.journal.add(Promise.CHUNKS, f"{rig.leased_pages()} pages at the end, {pages} were enough")
                rig.finish(sequence)
            require(rig, Promise.CHUNKS)

    def _headroom_pages(self) -> int:
        return -(-DRAFT_TOKENS // self.page_size) if self.speculative else 0

    def test_leaves_holding_sequences_alone(self) -> None:
        with self.rig() as rig:
            holder = rig.complete(rig.prompt(self.page_size), 2)
            runner = rig.complete(rig.prompt(self.page_size + 1), 1)
            ghost = rig.admit(rig.prompt(2 * self.page_size))
            rig.decode([runner], steps=self.page_size)
            rig.chunk(ghost, self.page_size)
            rig.decode([runner, holder], steps=2)
            for sequence in (holder, runner, ghost):
                rig.cancel(sequence)
        require(rig, Promise.HOLDS)

    # --- text --------------------------------------------------------------------------------------------

    def test_text_equals_the_solo_twin(self) -> None:
        """Cold, warm, and with reuse off; one after the other, so that nothing but reuse can matter."""
        with self.rig() as rig:
            prompt = rig.prompt(3 * self.page_size + 1)
            for lookup in (None, None, _BYPASS):
                rig.generate(prompt, self.page_size + 1, lookup_policy=lookup)
            first = rig.generate([*prompt, *rig.prompt(2)], 2)
            rig.generate([*first.tokens, *rig.prompt(1)], self.page_size)
        require(rig, Promise.SAME_TEXT)

    # --- lifecycle ---------------------------------------------------------------------------------------

    def test_survives_compaction(self) -> None:
        """Every one of three leaves in turn; the others go on where they were."""
        for leaving in range(3):
            with self.rig() as rig:
                sequences = [rig.complete(rig.prompt(self.page_size + index), 2) for index in range(3)]
                rig.finish(sequences.pop(leaving))
                rig.decode(sequences, steps=self.page_size)
                for sequence in sequences:
                    rig.finish(sequence)
            require(rig, Promise.SAME_TEXT)

    def test_survives_an_end_on_the_first_token(self) -> None:
        with self.rig() as rig:
            for length in (1, self.page_size, self.page_size + 1, 3 * self.page_size):
                sequence = rig.complete(rig.prompt(length), 1)
                rig.finish(sequence)
                rig.look()
            rig.check_baseline()
        require(rig, Promise.SAME_TEXT)

    def test_serves_joiners_midway(self) -> None:
        """A second prompt comes in chunks while the first answer grows, packed into the same steps."""
        with self.rig(look_again=False) as rig:
            founder = rig.complete(rig.prompt(self.page_size), 2)
            joiner = rig.admit(rig.prompt(3 * self.page_size + 1))
            while joiner.prompt_remaining:
                rig.mixed(decode=[founder], chunks=[(joiner, self.page_size)])
            rig.decode([founder, joiner], steps=self.page_size)
            rig.finish(founder)
            rig.finish(joiner)
        require(rig, Promise.SAME_TEXT)

    def test_survives_an_empty_batch(self) -> None:
        with self.rig() as rig:
            rig.check_baseline()
            rig.generate(rig.prompt(self.page_size), 2)
            rig.check_baseline()
            rig.generate(rig.prompt(self.page_size + 1), 2)
        require(rig, Promise.SAME_TEXT)

    # --- traffic, judged for each promise ------------------------------------------------------------------

    def _judge_traffic(self, *promises: Promise) -> None:
        """A random walk and batches.  Run once per suite; each promise has a test that judges the same runs."""
        runs = _TRAFFIC.get(type(self))
        if runs is None:
            runs = _TRAFFIC[type(self)] = list(self._run_traffic())
        for rig in runs:
            require(rig, *promises, whole=False)

    def _run_traffic(self) -> Iterator[Rig]:
        for seed in _WALK_SEEDS:
            with self.rig(num_pages=6 * self.page_size) as rig:
                random_walk(rig, seed=seed, steps=_WALK_STEPS)
            yield rig
        with self.rig(batches=True) as rig:
            batches(rig)
        yield rig

    def test_traffic_publishes_nothing_early(self) -> None:
        self._judge_traffic(Promise.NOTHING_EARLY)

    def test_traffic_publishes_nothing_beyond_the_common_length(self) -> None:
        self._judge_traffic(Promise.NOTHING_BEYOND)

    def test_traffic_keeps_what_requests_want(self) -> None:
        self._judge_traffic(Promise.COMMIT_POLICY, Promise.BYPASS)

    def test_traffic_moves_the_ledger_by_what_ran(self) -> None:
        self._judge_traffic(Promise.PROGRESS, Promise.HOLDS)

    def test_traffic_gives_everything_back(self) -> None:
        self._judge_traffic(Promise.NO_LEAK)

    def test_traffic_changes_no_text(self) -> None:
        self._judge_traffic(Promise.SAME_TEXT)

    def test_traffic_raises_nothing(self) -> None:
        self._judge_traffic(Promise.RAISES_NOTHING, Promise.HONEST_STATUS)

    # --- behaviour ---------------------------------------------------------------------------------------

    def test_raises_nothing(self) -> None:
        """No exception, no nonsense, and no fault counted that the suite cannot explain."""
        with self.rig() as rig:
            assert isinstance(rig.policy_name, str), f"the policy's name is {rig.policy_name!r}; text is needed"
            assert rig.policy_name, "the policy's name is empty; name it"
            first = rig.complete(rig.prompt(2 * self.page_size), self.page_size + 1)
            rig.finish(first)
            second = rig.complete(rig.prompt(3), 1)
            rig.decode([second], steps=2)
            rig.cancel(second)
            rig.check_fault_counters()
        require(rig, Promise.RAISES_NOTHING)

    def test_tells_the_truth_about_its_status(self) -> None:
        with self.rig() as rig:
            sequence = rig.complete(rig.prompt(2 * self.page_size), self.page_size)
            rig.finish(sequence)
        require(rig, Promise.HONEST_STATUS)

    def test_finishes_within_the_deadline(self) -> None:
        """Unwatched, with the default deadline; a busy machine gets a second and a third trial."""
        overruns = 0
        for _ in range(_DEADLINE_TRIALS):
            with self.rig(watched=False) as rig:
                for _ in range(3):
                    sequence = rig.complete(rig.prompt(4 * self.page_size), 2 * self.page_size)
                    rig.finish(sequence)
                overruns = rig.deadline_overruns
            if not overruns:
                return
        rig.journal.add(Promise.DEADLINE, f"{overruns} hooks took longer than {DEADLINE_SECONDS} s")
        require(rig, Promise.DEADLINE)
