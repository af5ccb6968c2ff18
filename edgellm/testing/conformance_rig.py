"""The deployment that a policy is certified on: a toy driver, a watch, and somebody who looks up all the time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from edgellm._core.block_hash import TokenChain
from edgellm.cache.policy import LedgerOnlyPolicy, PublicationPolicy
from edgellm.cache.types import (
    ContextCacheCommitPolicy,
    ContextCacheConfig,
    ContextCacheCoordinatorStatus,
    ContextCacheDeploymentProfile,
    ContextCacheLookupPolicy,
    ResourceType,
)
from edgellm.errors import CallerError, ContractViolation, InvariantError, SessionLostError
from edgellm.plugins import PolicyRegistration
from edgellm.testing.conformance_journal import Journal, Promise, SequenceTruth
from edgellm.testing.conformance_watch import Watch
from edgellm.testing.recount import count_all, recount
from edgellm.testing.toy import PoisonReadError, ToyKVCache
from edgellm.testing.toy_batch_driver import ToyBatchDriver
from edgellm.testing.toy_driver import DECODE, ToyDriver
from edgellm.testing.toy_model import SoloRun
from edgellm.testing.toy_sequence import ToySequence, check_state, checkpoint_fingerprint

if TYPE_CHECKING:
    from edgellm._core.planners import ReusePlan
    from edgellm.cache.coordinator import ContextCacheCoordinator

# What a broken policy can do to a scenario: wrong state, a wrong token, a request that was given up, a ledger so wrong
# that the coordinator refuses the runtime's next call.
_CUT_SHORT = (InvariantError, PoisonReadError, SessionLostError, CallerError)

DRAFT_TOKENS = 3
DEADLINE_SECONDS = ContextCacheConfig().policy_deadline_seconds
_STRANGER = 1  # a token that no prompt of the suite holds: whoever looks up goes on with it
_FIRST_TOKEN = 2


class Rig:
    """Args:
        policy: class or factory of the policy under test.
        watched: watch and check everything; False runs at full speed, with the default deadline.
        look_again: prompts in flight take over what others publish, as a runtime does.
        batches: requests are batches that begin and end as a whole; else all join one container.

    Attributes:
        journal: truths and findings.
        driver: the toy runtime.
        aborted: what cut the scenario short, or None.
    """

    def __init__(
        self,
        policy: Callable[[ContextCacheCoordinator], PublicationPolicy],
        profile: ContextCacheDeploymentProfile,
        *,
        speculative: bool,
        page_size: int,
        num_pages: int,
        max_batch: int,
        watched: bool,
        look_again: bool = True,
        batches: bool = False,
    ) -> None:
        self.journal = Journal()
        self.aborted: BaseException | None = None
        self.speculative = speculative
        self._watched = watched
        self._closed = False
        self._twins: dict[tuple[int, ...], SoloRun] = {}
        self._random = np.random.default_rng(20)
        paired = speculative and profile.owns_paged_spec_state and not profile.uses_checkpoint_reuse
        self.watch = Watch(self.journal, paired_draft=paired, probe=self.look)
        self._batches = batches
        self.driver: ToyDriver = (_WatchedBatchDriver if batches else _WatchedDriver)(
            profile,
            watch=self.watch if watched else None,
            page_size=page_size,
            num_pages=num_pages,
            max_batch=max_batch,
            speculative=speculative,
            draft_tokens=DRAFT_TOKENS,
            check=False,  # the rig counts and compares by itself, and says whose promise was broken
            look_again=look_again,
            policies=_registrations(self.watch.factory(policy) if watched else policy, speculative),
            config=ContextCacheConfig(
                checkpoint_interval_tokens=2 * page_size,
                policy_deadline_seconds=None if watched else DEADLINE_SECONDS,
            ),
        )

    def __enter__(self) -> Rig:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        """End everybody.  A scenario that read wrong state becomes a finding; any other error passes."""
        if error is None:
            self._close()
            return False
        self.driver.request.abandon()
        if not isinstance(error, _CUT_SHORT):
            return False
        self.aborted = error
        promise = Promise.SAME_TEXT
        if isinstance(error, SessionLostError | CallerError):
            promise = Promise.RAISES_NOTHING
        elif isinstance(error, PoisonReadError):
            promise = Promise.NOTHING_EARLY
        if not self.journal.findings:  # else it is a consequence of what was found
            self.journal.add(promise, str(error))
        return True

    def _close(self) -> None:
        if self._closed or not self.driver.request.valid():
            return
        self._closed = True
        self.cancel(*self.driver.live.values())
        self.driver.coordinator.finish(self.driver.request)
        self.driver.coordinator.shutdown()

    # --- queries -----------------------------------------------------------------------------------------

    @property
    def coordinator(self) -> ContextCacheCoordinator:
        return self.driver.coordinator

    @property
    def batch_driver(self) -> ToyBatchDriver:
        """The driver of a rig that was built for batches."""
        if not isinstance(self.driver, ToyBatchDriver):
            raise ContractViolation("this rig runs one container; build it with batches=True")
        return self.driver

    @property
    def policy_name(self) -> object:
        return self.driver.request.impl.policy.name

    @property
    def deadline_overruns(self) -> int:
        return self.coordinator.metrics().policy_deadline_overruns

    def leased_pages(self) -> int:
        """Base and draft pages with an active reference."""
        counted = count_all(self.coordinator.manager)
        return counted.base.leased + counted.draft.leased

    def known(self, tokens: Sequence[int]) -> int:
        """Leading tokens that a stranger's lookup finds."""
        return self._plan(np.asarray(tokens, np.int32)).matched_token_length

    def _plan(self, tokens: np.ndarray, *, speculative: bool | None = None) -> ReusePlan:
        chain = TokenChain(self.coordinator.page_size, self._key_extras())
        chain.extend(np.append(tokens, np.int32(_STRANGER)))
        kind = self.speculative if speculative is None else speculative
        return self.coordinator.manager.plan(chain, ContextCacheLookupPolicy.USE_CACHE, speculative=kind)

    def _key_extras(self) -> Any:
        truths = self.journal.truths.values()
        return next((truth.sequence.key_extras for truth in truths), None)

    # --- looking up --------------------------------------------------------------------------------------

    def look(self) -> None:
        """Somebody else looks up every sequence there was: what is found must be proven, permitted and written."""
        for truth in list(self.journal.truths.values()):
            tokens = np.asarray(truth.tokens, np.int32)
            for speculative in {False, self.speculative}:
                plan = self._plan(tokens, speculative=speculative)
                if self._may_be_found(truth, tokens, max(plan.matched_token_length, plan.known_token_length)):
                    self._check_written(tokens, plan)

    def _may_be_found(self, truth: SequenceTruth, tokens: np.ndarray, found: int) -> bool:
        proven, permitted = self.journal.may_be_findable(tokens)
        if found > proven:
            promise = Promise.NOTHING_BEYOND if truth.is_at_rest else Promise.NOTHING_EARLY
            self.journal.add(promise, f"{found} tokens of a sequence can be found when {proven} are complete")
        elif found > permitted:
            promise = Promise.COMMIT_POLICY if truth.publishes else Promise.BYPASS
            self.journal.add(promise, f"{found} tokens of a sequence can be found; its request permits {permitted}")
        return found <= proven

    def _check_written(self, tokens: np.ndarray, plan: ReusePlan) -> None:
        """The state behind a hit is that of the same tokens computed alone."""
        length = plan.reuse_token_length
        if not length:
            return
        try:
            wrong = self._wrong_state([int(token) for token in tokens] + [_STRANGER], plan, length)
        except PoisonReadError as error:
            self.journal.add(Promise.NOTHING_EARLY, f"a hit of {length} tokens reads what nobody wrote: {error}")
            return
        if wrong:
            self.journal.add(Promise.SAME_TEXT, f"a hit of {length} tokens finds {wrong} of something else")

    def _wrong_state(self, tokens: list[int], plan: ReusePlan, length: int) -> str:
        """Which part of the state behind a hit is not that of the tokens, or nothing."""
        machine, twin = self.driver.machine, self._twin(tokens)
        if machine.model.has_attention:
            found = _read(machine.base, plan.base_page_bindings, plan.tail_source, length)
            if found != twin.values[: len(found)]:
                return "pages"
        if machine.draft is not None and len(plan.draft_page_bindings):
            found = _read(machine.draft, plan.draft_page_bindings, plan.draft_tail_source, length)
            right = min(len(found), length - self._unsettled_drafts())
            if found[:right] != twin.drafts[:right]:
                return "draft pages"
        snapshot = plan.recurrent_snapshot_binding
        if snapshot is None or machine.storage is None:
            return ""
        saved = machine.storage.fingerprint(int(snapshot))
        return "" if saved == checkpoint_fingerprint(twin, length) else "a checkpoint"

    def _unsettled_drafts(self) -> int:
        """Draft entries at the end of a hit that the toy computes from a token a contract says nothing about."""
        contract = self.driver.profile.spec_reuse_contract
        return 1 if self.driver.mtp or contract is None or contract.future_dependency_tokens == 0 else 0

    def _twin(self, tokens: list[int]) -> SoloRun:
        key = tuple(tokens)
        if key not in self._twins:
            self._twins[key] = SoloRun(self.driver.model, tokens)
        return self._twins[key]

    # --- driving -----------------------------------------------------------------------------------------

    def prompt(self, length: int) -> list[int]:
        """Fresh tokens."""
        return [int(t) for t in self._random.integers(_FIRST_TOKEN, self.driver.model.vocab_size, length)]

    def admit(
        self,
        tokens: Sequence[int],
        *,
        lookup_policy: ContextCacheLookupPolicy | None = None,
        commit_policy: ContextCacheCommitPolicy | None = None,
    ) -> ToySequence:
        """Join one sequence; it must find room."""
        sequence = self.try_admit(tokens, lookup_policy=lookup_policy, commit_policy=commit_policy)
        if sequence is None:
            raise AssertionError(f"a prompt of {len(tokens)} tokens was refused: {self.driver.last_admission}")
        return sequence

    def try_admit(
        self,
        tokens: Sequence[int],
        *,
        lookup_policy: ContextCacheLookupPolicy | None = None,
        commit_policy: ContextCacheCommitPolicy | None = None,
    ) -> ToySequence | None:
        sequence = self.driver.admit(tokens, lookup=lookup_policy, commit=commit_policy)
        if sequence is not None and self._watched:
            self.watch.see(self.driver.request.impl)
            self.look()
        return sequence

    def chunk(self, sequence: ToySequence, num_tokens: int) -> None:
        self.mixed(chunks=[(sequence, num_tokens)])

    def finish_prompt(self, sequence: ToySequence, chunk: int = 1 << 20) -> int:
        """Run the rest of a prompt in chunks; returns how many steps that took."""
        steps = 0
        while sequence.prompt_remaining:
            self.chunk(sequence, chunk)
            steps += 1
        return steps

    def planned_steps(self, sequence: ToySequence, chunk: int) -> int:
        """Steps that the rest of a prompt needs when chunks also end at the policy's checkpoints."""
        steps, committed = 0, sequence.committed
        while committed < len(sequence.prompt):
            end = min(committed + chunk, len(sequence.prompt))
            committed = min([end, *(length for length in sequence.boundaries if committed < length < end)])
            steps += 1
        return steps

    def complete(self, tokens: Sequence[int], num_generated: int, **options: Any) -> ToySequence:
        """Admit, run the prompt, and generate at least so many tokens (exactly so many without speculation)."""
        sequence = self.admit(tokens, **options)
        self.finish_prompt(sequence)
        while len(sequence.generated) < num_generated:
            self.decode([sequence])
        return sequence

    def generate(self, tokens: Sequence[int], num_generated: int, **options: Any) -> ToySequence:
        """`complete` and `finish`."""
        sequence = self.complete(tokens, num_generated, **options)
        self.finish(sequence)
        return sequence

    def decode(self, sequences: Sequence[ToySequence], *, steps: int = 1) -> None:
        for _ in range(steps):
            self.mixed(decode=sequences)

    def mixed(self, *, decode: Sequence[ToySequence] = (), chunks: Sequence[tuple[ToySequence, int]] = ()) -> None:
        """One step of prompt chunks and decode rows; everybody else holds."""
        if not self.try_mixed(decode=decode, chunks=chunks):
            raise AssertionError("a step was refused for want of pages; the pool of this scenario is too small")

    def try_mixed(self, *, decode: Sequence[ToySequence] = (), chunks: Sequence[tuple[ToySequence, int]] = ()) -> bool:
        produced = self.driver.mixed_step([*chunks, *((sequence, DECODE) for sequence in decode)])
        self._between_calls()
        return produced is not None

    def finish(self, *sequences: ToySequence) -> None:
        """They end normally and leave."""
        self.driver.finish(*sequences)
        self._between_calls()

    def cancel(self, *sequences: ToySequence) -> None:
        """They leave without having ended normally."""
        if sequences:
            self.driver.cancel(*sequences)
            self._between_calls()

    def begin_batch(self, *prompts: Sequence[int]) -> list[ToySequence]:
        sequences = self.batch_driver.begin(*prompts)
        if sequences is None:
            raise AssertionError("a batch was refused; the pool of this scenario is too small")
        self.watch.see(self.driver.request.impl)
        self.look()
        return sequences

    def prefill_batch(self) -> None:
        """Run every prompt of the batch."""
        self.batch_driver.prefill_batch()
        self._between_calls()

    def finish_batch(self) -> None:
        """End the request normally, whoever is still in it."""
        status = self.batch_driver.finish_batch()
        if status is not ContextCacheCoordinatorStatus.OK:
            self.journal.add(Promise.HONEST_STATUS, f"the end of a batch answered {status.value}")
        self.look()

    def _between_calls(self) -> None:
        if not self._watched:
            return
        self.look()
        self._check_books()
        self._check_snapshots()
        self._check_states()

    def _check_books(self) -> None:
        """Every invariant of coordinator and manager, and every unit of every pool."""
        try:
            recount(self.coordinator)
        except InvariantError as error:
            self.journal.add(Promise.NO_LEAK, str(error))

    def _check_states(self) -> None:
        """What the device holds for every live sequence is what its solo twin has."""
        for sequence in self.driver.live.values():
            try:
                check_state(self.driver.machine, sequence)
            except PoisonReadError as error:
                self.journal.add(Promise.NOTHING_EARLY, f"a sequence holds what nobody wrote: {error}")
            except InvariantError as error:
                self.journal.add(Promise.SAME_TEXT, str(error))

    def _check_snapshots(self) -> None:
        """Between steps nobody holds a snapshot slot but the sequences that are still bound to one."""
        if not self.driver.profile.uses_checkpoint_reuse:
            return
        request = self.driver.request
        leases = request.impl.leases if request.valid() else []
        bound = sum(lease.recurrent_snapshot_slot is not None for lease in leases)
        held = count_all(self.coordinator.manager).recurrent.leased
        if held > bound:
            self.journal.add(Promise.NO_LEAK, f"{held} snapshots are held between steps, {bound} are in use")

    def fail_the_drain(self) -> None:
        """The request ends while its stream cannot be waited for; then the stream is well again."""
        coordinator, sync = self.coordinator, self.driver.sync
        sync.failing = True
        status = coordinator.finish(self.driver.request)
        if status is not ContextCacheCoordinatorStatus.POISONED:
            self.journal.add(Promise.NO_LEAK, f"the end of a request answered {status.value} when its wait had failed")
        sync.failing = False
        if not coordinator.recover():
            self.journal.add(Promise.NO_LEAK, "the coordinator could not recover though its stream is idle")
        self.driver.live.clear()
        self._closed = True

    # --- after the fact ----------------------------------------------------------------------------------

    def check_baseline(self) -> None:
        """Nobody is alive: nothing is leased, and after an eviction of everything nothing is held."""
        manager = self.coordinator.manager
        for kind, counted in zip(ResourceType, count_all(manager).pools, strict=True):
            if counted.leased:
                units = f"{counted.leased} of {counted.total} units of {kind.name}"
                self.journal.add(Promise.NO_LEAK, f"{units} are still leased when nobody is alive")
        if manager.num_live_leases:
            self.journal.add(Promise.NO_LEAK, f"{manager.num_live_leases} leases are alive when no sequence is")
            return
        self.coordinator._manager.evict_all()
        for kind, counted in zip(ResourceType, count_all(manager).pools, strict=True):
            if counted.free != counted.total:
                units = f"{counted.total - counted.free} of {counted.total} units of {kind.name}"
                self.journal.add(Promise.NO_LEAK, f"{units} are held when everything was evicted")

    def check_fault_counters(self) -> None:
        """The coordinator charged no fault that the watch did not see."""
        counted = self.coordinator.metrics().policy_failures
        if counted > self.journal.faulty_calls:
            seen = f"the coordinator counted {counted} policy failures, the watch saw {self.journal.faulty_calls}"
            self.journal.add(Promise.RAISES_NOTHING, f"{seen}; its log says what they are")


class _WatchedDriver(ToyDriver):
    """A toy driver whose coordinator is watched from its first call on."""

    def __init__(self, profile: ContextCacheDeploymentProfile, *, watch: Watch | None, **options: Any) -> None:
        self._watch = watch
        super().__init__(profile, **options)

    def _build_coordinator(
        self, config: ContextCacheConfig, policies: Iterable[PolicyRegistration] | None
    ) -> ContextCacheCoordinator:
        coordinator = super()._build_coordinator(config, policies)
        if self._watch is not None:
            self._watch.spy_on(coordinator)
        return coordinator


class _WatchedBatchDriver(_WatchedDriver, ToyBatchDriver):
    """The same for batches."""


def _read(cache: ToyKVCache, pages: Iterable[int], tail: int | None, length: int) -> list[int]:
    """The values that a hit of `length` tokens finds in its pages and in the page its tail is copied from."""
    row = [int(page) for page in pages]
    if tail is not None:
        row.append(int(tail))
    values: list[int] = cache.read(row, min(length, len(row) * cache.page_size)).tolist()
    return values


def _registrations(factory: Callable[..., Any], speculative: bool) -> list[PolicyRegistration]:
    """The policy under test for its kind of request, and one that publishes nothing for the other kind."""
    return [
        PolicyRegistration("under-test", factory, lambda profile, kind: kind == speculative, 1, "conformance"),
        PolicyRegistration("nothing", LedgerOnlyPolicy, lambda profile, kind: True, 0, "conformance"),
    ]


def require(rig: Rig, *promises: Promise, whole: bool = True) -> None:
    """Raise AssertionError when one of these promises was broken.

    Args:
        whole: also when the scenario was cut short, so that nothing is proven.  False where another test judges the
            same run by every other promise.
    """
    findings = rig.journal.of(*promises)
    if findings:
        broken = {finding.promise: None for finding in findings}
        said = " and ".join(promise.value for promise in broken)
        lines = "".join(f"\n  {finding}" for finding in findings[:8])
        raise AssertionError(f"the policy does not keep its promise: it {said}{lines}")
    if whole and rig.aborted is not None:
        raise AssertionError(f"the scenario was cut short, so nothing is proven: {rig.aborted}") from rig.aborted
