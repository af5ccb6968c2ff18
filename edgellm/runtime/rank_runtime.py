"""`LLMRankRuntime`: everything one rank owns for the life of a model, and the way into a session."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from edgellm._core.page_table import KVPageTable
from edgellm.cache.coordinator import ContextCacheCoordinator
from edgellm.cache.deployment import SPEC_REUSE_CONTRACTS, VERIFYING_DECODERS, check_support
from edgellm.cache.identity import request_key_extras
from edgellm.cache.types import (
    ContextCacheConfig,
    ContextCacheDeploymentProfile,
    ContextCachePhysicalResources,
)
from edgellm.errors import (
    AdmissionError,
    ContractViolation,
    InvalidArgumentError,
    RequestFailed,
    UnsupportedModelError,
    UnsupportedRequestError,
)
from edgellm.foreign import describe_value
from edgellm.plugin_guard import build_decoder
from edgellm.runtime.batch import resources_of
from edgellm.sampling.guidance import Guidance
from edgellm.sampling.sampler import Sampler
from edgellm.session.frame import SessionGeometry
from edgellm.session.rank_session import RankRuntimeSession
from edgellm.session.types import (
    AdmissionResult,
    AdmissionStatus,
    FinishReason,
    RequestId,
    ScheduledSequenceDescriptor,
    SequenceIdentity,
    SequenceWork,
    SessionOptions,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from edgellm.cache.metrics import ContextCacheMetrics
    from edgellm.cache.quarantine import StreamSynchronizer
    from edgellm.cache.types import BlockKeyExtras, DeploymentConfig
    from edgellm.decoding.base import DecodingStrategy
    from edgellm.plugins import Plugins
    from edgellm.request import LLMGenerationRequest, LLMGenerationResponse
    from edgellm.runtime.batch import Executor, StateResources
    from edgellm.session.types import BatchResult

_BLOCKING_REQUEST = RequestId(1)


class LLMRankRuntime:
    """Executor, page table, context cache, decoder, sampler and tokenizer of one rank.

    At most one session is open at a time, and the blocking `handle_request` is refused while one is.

    Args:
        executor: runs forwards; owned by the caller, must outlive the runtime.  One that keeps more than base K and V
            says so by `resources()` (`StatefulExecutor`): recurrent state and snapshot slots, a draft model's pages.
        tokenizer: `edgellm.tokenization.tokenizer.Tokenizer` or anything with its methods.
        plugins: what was loaded (`load_plugins()`); policy and decoder are chosen from it here, once.
        config: context cache; `enabled=False` manages pages but reuses nothing.
        model_fingerprint: identity of the weights; contexts of different models are never shared.
        kv_dtype: element type of the KV pages, for the same reason.
        decoder_kind: which registered decoder runs.
        decoder: that decoder, where it is built already; None builds it.
        draft_cache: the paged store that the decoder opened (`DecodingStrategy.open_draft`).
        reserve_growth: admit a sequence only when everybody resident can run to its end; False admits as
            soon as the prompt fits, and a sequence that finds no page later ends with ERROR.
        synchronizer: waits for the stream in place of the real wait (tests inject failures here).
    Raises:
        UnsupportedModelError: the decoder kind does not go with the model's kind of state, or the decoder speculates
            and the executor cannot verify.
    """

    def __init__(
        self,
        executor: Executor,
        tokenizer: Any,
        deployment: DeploymentConfig,
        *,
        plugins: Plugins,
        config: ContextCacheConfig | None = None,
        model_fingerprint: str,
        kv_dtype: str = "float32",
        decoder_kind: str = "vanilla",
        decoder: DecodingStrategy | None = None,
        draft_cache: Any = None,
        reserve_growth: bool = True,
        synchronizer: StreamSynchronizer | None = None,
    ) -> None:
        self.executor = executor
        self.tokenizer = tokenizer
        self.deployment = deployment
        self.reserve_growth = reserve_growth
        state = resources_of(executor)
        if decoder_kind in SPEC_REUSE_CONTRACTS:  # a kind that only a plugin knows is its plugin's to judge
            check_support(state.base_state_kind, decoder_kind)
        self.decoder_kind = decoder_kind
        # The engine asks it on every thread and longer than the runtime lives: it knows the kind, not the runtime.
        self.check_decoder = partial(_check_decoder, decoder_kind)
        built = decoder if decoder is not None else build_decoder(plugins.choose_decoder(decoder_kind))
        self.decoder: DecodingStrategy = built
        _check_verifies(self.decoder, executor)
        self.decoder.attach(executor)
        self.sampler = Sampler()
        self.guidance = Guidance(tokenizer, executor.vocab_size)
        profile = ContextCacheDeploymentProfile(state.base_state_kind, self.decoder.spec_reuse_contract())
        plugins.require_policies(profile)
        self.page_table = state.base_page_table or _new_table(deployment, max(1, deployment.num_pages))
        self._draft_page_table = _draft_table(state, deployment, profile)
        self.coordinator = ContextCacheCoordinator(
            config if config is not None else ContextCacheConfig(),
            deployment,
            profile,
            ContextCachePhysicalResources(
                base_cache=executor.kv_cache,
                base_page_table=self.page_table,
                draft_cache=state.draft_cache if draft_cache is None else draft_cache,
                draft_page_table=self._draft_page_table,
                snapshot_storage=state.snapshot_storage,
            ),
            executor.device.stream,
            synchronizer,
            plugins.policies,
        )
        self.geometry = SessionGeometry(
            max_batch_size=deployment.max_batch_size,
            max_input_length=deployment.max_input_length,
            max_kv_capacity=deployment.max_kv_capacity,
            page_size=deployment.page_size,
            num_pages=_pages_of_one_sequence(deployment, profile),
            headroom=self.decoder.required_kv_headroom(),
            vocab_size=executor.vocab_size,
        )
        self._model_fingerprint = model_fingerprint
        self._kv_dtype = kv_dtype
        self._unsalted = self._extras(None)
        self._compact_refusal = ""
        self._session: RankRuntimeSession | None = None
        self._latch = threading.Lock()
        self._closed = False

    @property
    def draft_page_rows(self) -> npt.NDArray[np.int32] | None:
        """(num_slots, pages_per_slot) int32, the draft model's page table; None where it has no pages of its own."""
        return None if self._draft_page_table is None else self._draft_page_table.rows

    @property
    def kv_dtype(self) -> str:
        """Element type of the KV pages."""
        return self._kv_dtype

    def open_session(self, options: SessionOptions | None = None) -> RankRuntimeSession:
        """A session, to be driven by the calling thread alone and closed before the next one opens.

        Raises:
            InvalidArgumentError: `options` is something else.
            ContractViolation: a session is open, a blocking request runs, or the runtime is closed.
            BrokenInvariantError: the context cache is poisoned by an earlier device failure, and the device's stream
                still cannot be drained.
        """
        if options is not None and not isinstance(options, SessionOptions):
            raise InvalidArgumentError(
                f"options is {describe_value(options)}; pass edgellm.session.types.SessionOptions(...) or None"
            )
        if self._closed:
            raise ContractViolation("open_session: the runtime is closed; build a new one")
        if not self._latch.acquire(blocking=False):
            raise ContractViolation(
                "open_session: a session or a blocking request holds this runtime; close the session first"
            )
        try:
            self._session = RankRuntimeSession(self, options if options is not None else SessionOptions())
        except BaseException:
            self._latch.release()
            raise
        return self._session

    def session_closed(self, session: RankRuntimeSession) -> None:
        """Called by the session's `close`, once: gives the latch back."""
        if self._session is session:
            self._session = None
            self._latch.release()

    def handle_request(self, request: LLMGenerationRequest) -> LLMGenerationResponse:
        """Run one request to its end on the calling thread, through the same session code.

        Raises:
            UnsupportedRequestError, AdmissionError, InputTooLongError: as `RuntimeSession.admit`.
            ContractViolation: a session is open.
            RequestFailed: the request ended with an error.
        """
        with self.open_session(SessionOptions(allow_compact_execution=request.token_callback is None)) as session:
            admission = session.admit(request, _BLOCKING_REQUEST)
            if admission.status is not AdmissionStatus.ADMITTED:
                raise AdmissionError(f"the request was refused ({admission.status.value}): {admission.reason}")
            snapshot = _run_to_end(session, admission, self.deployment.max_input_length)
            response = session.materialize(snapshot, request.sampling.stop_strings)
        if response.finish_reason is FinishReason.ERROR:
            raise RequestFailed(response.error_message or "the request ended with an error")
        return response

    def resolve_compact(self, options: SessionOptions) -> tuple[bool, str]:
        """Whether steps may mix chunks and decode rows, and if not, why."""
        if not options.allow_compact_execution:
            return False, "compact execution was not requested (SessionOptions.allow_compact_execution)"
        if self._compact_refusal:
            return False, self._compact_refusal
        if not self.decoder.capabilities().ragged_steps:
            return False, f"the decoder {self.decoder.name!r} cannot mix prompt chunks and decode rows in a step"
        if not self.coordinator.supports_live_sequence_admission():
            return False, "the context cache of this deployment cannot admit sequences while others execute"
        return True, ""

    def refuse_compact(self, failure: str) -> None:
        """A compact step was declined: unavailable from now on, for this runtime's life."""
        self._compact_refusal = failure

    def key_extras(self, request: LLMGenerationRequest) -> BlockKeyExtras:
        """Identity of the request's context beside its tokens: model, KV dtype and salt."""
        return self._unsalted if request.cache_salt is None else self._extras(request.cache_salt)

    def _extras(self, salt: str | None) -> BlockKeyExtras:
        return request_key_extras(model_fingerprint=self._model_fingerprint, kv_dtype=self._kv_dtype, cache_salt=salt)

    def context_cache_metrics(self) -> ContextCacheMetrics | None:
        """Counters over the runtime's life; None when the cache is disabled."""
        return self.coordinator.metrics() if self.coordinator.config.enabled else None

    def close(self) -> None:
        """End of life; idempotent.

        Raises:
            ContractViolation: a session is open; close it first.
            BrokenInvariantError: device work of an earlier failure cannot be drained.
        """
        if self._closed:
            return
        if self._session is not None:
            raise ContractViolation("close: a session is open on this runtime; close the session first")
        self.coordinator.shutdown()
        self.coordinator.close()
        self._closed = True

    def __enter__(self) -> LLMRankRuntime:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_decoder(kind: str, request: LLMGenerationRequest) -> None:
    """Refuse what a kind of decoder cannot run.

    Raises:
        UnsupportedRequestError: the request switches speculation off, which this kind does not serve.
    """
    if request.disable_spec_decode and kind in VERIFYING_DECODERS:
        raise UnsupportedRequestError(
            f"disable_spec_decode is True, but the decoder of this deployment ({kind}) only verifies proposals and has "
            "no model that decodes without them; leave it False"
        )


def _check_verifies(decoder: DecodingStrategy, executor: Executor) -> None:
    """
    Raises:
        UnsupportedModelError: the decoder proposes tokens, and the executor has no way to check several in one step.
    """
    if decoder.is_speculative and not hasattr(executor, "forward_verify"):
        raise UnsupportedModelError(
            f"decoder {decoder.name!r} proposes tokens, and {type(executor).__name__} cannot verify them; use an "
            "executor that has forward_verify, or leave speculative out"
        )


def _new_table(deployment: DeploymentConfig, num_pages: int) -> KVPageTable:
    return KVPageTable(deployment.max_batch_size, deployment.pages_per_slot, num_pages)


def _draft_table(
    state: StateResources, deployment: DeploymentConfig, profile: ContextCacheDeploymentProfile
) -> KVPageTable | None:
    if state.draft_page_table is not None or not profile.owns_paged_spec_state:
        return state.draft_page_table  # type: ignore[no-any-return]
    return _new_table(deployment, deployment.num_draft_pages)


def _pages_of_one_sequence(deployment: DeploymentConfig, profile: ContextCacheDeploymentProfile) -> int:
    """Most pages that one sequence can ever hold; what it computes needs a page of every pool at each place.

    Pure recurrent models have no pages: only the length limit bounds their sequences.
    """
    if not profile.has_attention:
        return deployment.max_batch_size * deployment.pages_per_slot
    if profile.owns_paged_spec_state:
        return min(deployment.num_pages, deployment.num_draft_pages)
    return deployment.num_pages


def _run_to_end(session: RankRuntimeSession, admission: AdmissionResult, max_chunk: int) -> BatchResult:
    """Drive the only resident of `session`: chunks of at most `max_chunk` tokens, then decode steps."""
    identity = SequenceIdentity(_BLOCKING_REQUEST, admission.ref)
    past, remaining = admission.prefill_start, admission.prompt_length - admission.prefill_start
    while True:
        query = min(remaining, max_chunk) if remaining else 1
        work = SequenceWork.CONTEXT if remaining else SequenceWork.DECODE
        result = session.execute([ScheduledSequenceDescriptor(identity, work, query, past, query >= remaining)])
        if not result.ok:
            raise RequestFailed(f"the step failed: {result.failure}")
        if result.finished:
            return result.finished[0][1]
        past += result.execution[0].query_length
        remaining = max(0, remaining - query)
