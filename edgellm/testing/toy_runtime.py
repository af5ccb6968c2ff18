"""Rank runtimes over the integer toy model: real cache, real session, exact text, no weights.

`ToyRuntime` is attention with plain decoding; `toy_runtime(flavour)` gives every flavour of state and speculation.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from edgellm.cache.types import ContextCacheConfig, DeploymentConfig
from edgellm.errors import InvariantError
from edgellm.plugins import DecoderRegistration, load_plugins
from edgellm.runtime.rank_runtime import LLMRankRuntime
from edgellm.testing.recount import Recount, recount
from edgellm.testing.toy import ToyExecutor
from edgellm.testing.toy_decoder import ToyChainDecoder
from edgellm.testing.toy_driver import FLAVOURS
from edgellm.testing.toy_executor import ToyStateExecutor
from edgellm.testing.toy_machine import ToyMachine
from edgellm.testing.toy_model import SoloRun, ToyModel
from edgellm.testing.toy_sequence import ToySequence, check_state
from edgellm.testing.toy_tokenizer import ToyTokenizer

if TYPE_CHECKING:
    from edgellm.cache.quarantine import StreamSynchronizer
    from edgellm.cache.types import ReuseReport
    from edgellm.plugins import Plugins
    from edgellm.session.resident import Resident
    from edgellm.testing.toy_drafter import ToyDrafter

TOY_VOCAB_SIZE = 512


class ToyRuntime(LLMRankRuntime):
    """`LLMRankRuntime` whose executor poisons every page that nobody leases or retains."""

    executor: ToyExecutor

    def __init__(
        self,
        *,
        max_batch_size: int = 4,
        max_input_length: int = 64,
        max_kv_capacity: int = 128,
        page_size: int = 4,
        num_pages: int = 96,
        config: ContextCacheConfig | None = None,
        tokenizer: ToyTokenizer | None = None,
        plugins: Plugins | None = None,
        reserve_growth: bool = True,
        synchronizer: StreamSynchronizer | None = None,
    ) -> None:
        tokenizer = tokenizer if tokenizer is not None else ToyTokenizer(TOY_VOCAB_SIZE)
        executor = ToyExecutor(vocab_size=tokenizer.vocab_size, num_pages=num_pages, page_size=page_size)
        super().__init__(
            executor,
            tokenizer,
            DeploymentConfig(
                max_batch_size=max_batch_size,
                max_input_length=max_input_length,
                max_kv_capacity=max_kv_capacity,
                page_size=page_size,
                num_pages=num_pages,
            ),
            plugins=plugins if plugins is not None else load_plugins(autoload=False),
            config=config,
            model_fingerprint="toy",
            kv_dtype="int64",
            reserve_growth=reserve_growth,
            synchronizer=synchronizer,
        )
        executor.watch(self.coordinator.manager.pools)


_BEFORE_ALL = 1_000_000
DECODER_KINDS = {
    "eagle": "eagle",
    "dflash": "dflash",
    "shared-kv": "shared_kv_mtp",
    "hybrid-lookup": "prompt_lookup",
    "mtp": "mtp",
}


class ToyFlavourRuntime(LLMRankRuntime):
    """`LLMRankRuntime` over a `ToyMachine`: what nobody holds is poisoned before each forward.

    Attributes:
        flavour: name in `FLAVOURS`.
        model: what a text must be: `solo_run(prompt, n, runtime.model)`.
    """

    executor: ToyStateExecutor

    def __init__(
        self,
        flavour: str,
        *,
        max_batch_size: int = 4,
        max_input_length: int = 64,
        max_kv_capacity: int = 128,
        page_size: int = 4,
        num_pages: int = 96,
        num_draft_pages: int | None = None,
        recurrent_slots: int = 16,
        partial_slots: int = 16,
        draft_tokens: int = 3,
        drafter: ToyDrafter | None = None,
        config: ContextCacheConfig | None = None,
        tokenizer: ToyTokenizer | None = None,
        plugins: Plugins | None = None,
        reserve_growth: bool = True,
        synchronizer: StreamSynchronizer | None = None,
    ) -> None:
        self.flavour = flavour
        profile = FLAVOURS[flavour]
        tokenizer = tokenizer if tokenizer is not None else ToyTokenizer(TOY_VOCAB_SIZE)
        self.model = ToyModel.of(profile, tokenizer.vocab_size)
        drafts = num_pages if num_draft_pages is None else num_draft_pages
        deployment = DeploymentConfig(
            max_batch_size=max_batch_size,
            max_input_length=max_input_length,
            max_kv_capacity=max_kv_capacity,
            page_size=page_size,
            num_pages=num_pages,
            num_draft_pages=drafts if profile.owns_paged_spec_state else 0,
        )
        machine = ToyMachine(
            profile, deployment, self.model, recurrent_slots=recurrent_slots, partial_slots=partial_slots
        )
        kind = DECODER_KINDS.get(flavour, "vanilla")
        loaded = plugins if plugins is not None else load_plugins()
        super().__init__(
            ToyStateExecutor(machine, profile),
            tokenizer,
            deployment,
            plugins=_with_toy_decoder(loaded, kind, draft_tokens, drafter, flavour),
            config=config if config is not None else ContextCacheConfig(policy_deadline_seconds=None),
            model_fingerprint=f"toy-{flavour}",
            kv_dtype="int64",
            decoder_kind=kind,
            reserve_growth=reserve_growth,
            synchronizer=synchronizer,
        )
        self.executor.watch(self.coordinator)
        self._twins: dict[int, SoloRun] = {}

    def solo(self, prompt: list[int], num_tokens: int) -> list[int]:
        """The text that must follow `prompt`, speculation and cache or not."""
        return SoloRun(self.model, prompt).continuation(num_tokens)

    def check(self) -> Recount:
        """Every invariant, every pool, and the state of every resident against its twin.  For between steps.

        Raises:
            InvariantError, PoisonReadError: something is not as if each sequence had run alone.
        """
        counted = recount(self.coordinator)
        residents = [] if self._session is None else self._session._order
        self._twins = {resident.request_id: self._twin(resident) for resident in residents}
        for resident in residents:
            check_state(self.executor.machine, self._sequence(resident))
        return counted

    def _twin(self, resident: Resident) -> SoloRun:
        known = self._twins.get(resident.request_id)
        tokens = [*resident.prompt.tolist(), *resident.generated]
        if known is None or known.tokens != tokens[: len(known)]:
            known = SoloRun(self.model)
        known.extend(tokens[len(known) :])
        return known

    def _sequence(self, resident: Resident) -> ToySequence:
        common = self.decoder.common_state_length(resident.ref.slot)
        return ToySequence(
            request_id=resident.request_id,
            resident=resident.ref,
            prompt=tuple(resident.prompt.tolist()),
            twin=self._twins[resident.request_id],
            committed=resident.state_length,
            drafted=common or 0,
            reuse=self._reuse_of(resident),
        )

    @staticmethod
    def _reuse_of(resident: Resident) -> ReuseReport:
        if resident.reuse is None:
            raise InvariantError(f"{resident.ref} has no reuse report")
        return resident.reuse


def toy_runtime(flavour: str = "attention", **options: Any) -> ToyFlavourRuntime:
    """A rank runtime of any flavour in `FLAVOURS`; options are those of `ToyFlavourRuntime`."""
    return ToyFlavourRuntime(flavour, **options)


def _with_toy_decoder(
    plugins: Plugins, kind: str, draft_tokens: int, drafter: ToyDrafter | None, flavour: str
) -> Plugins:
    """The plugins, with the toy's decoder in front of whoever else serves its kind."""
    contract = FLAVOURS[flavour].spec_reuse_contract
    if contract is None:
        return plugins
    made = ToyChainDecoder(f"toy-{flavour}", contract, num_drafts=draft_tokens, drafter=drafter)
    registration = DecoderRegistration(made.name, lambda: made, kind, _BEFORE_ALL, "toy")
    return replace(plugins, decoders=[registration, *plugins.decoders])
