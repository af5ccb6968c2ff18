"""A sequence may use its whole limit: the last generated token never gets state, so it needs no place in the pool."""

from __future__ import annotations

import pytest

from edgellm import LLM, SamplingParams
from edgellm.assembly import Parts
from edgellm.cache.types import DeploymentConfig
from edgellm.engine.config import EngineConfig
from edgellm.errors import InputTooLongError
from edgellm.memory import MemoryBudget
from edgellm.plugins import load_plugins
from edgellm.prompts import PromptLimits
from edgellm.runtime.rank_runtime import LLMRankRuntime
from edgellm.session.types import AdmissionStatus
from edgellm.testing.recount import require_baseline
from edgellm.testing.toy import ToyExecutor, toy_generate
from edgellm.testing.toy_tokenizer import ToyTokenizer

VOCAB = 300
PAGE = 4


def exact_parts(limit: int) -> Parts:
    """Context and pool of exactly `limit` tokens, which is a multiple of the page size."""
    executor = ToyExecutor(vocab_size=VOCAB, num_pages=limit // PAGE, page_size=PAGE)
    deployment = DeploymentConfig(
        max_batch_size=2, max_input_length=limit, max_kv_capacity=limit, page_size=PAGE, num_pages=limit // PAGE
    )
    tokenizer = ToyTokenizer(VOCAB)
    runtime = LLMRankRuntime(
        executor, tokenizer, deployment, plugins=load_plugins(autoload=False), model_fingerprint="toy", kv_dtype="int64"
    )
    executor.watch(runtime.coordinator.manager.pools)
    limits = PromptLimits(vocab_size=VOCAB, max_model_len=limit, pool_tokens=limit, headroom_tokens=1)
    budget = MemoryBudget(bytes_per_page=8 * PAGE, num_pages=limit // PAGE, page_size=PAGE, max_model_len=limit)
    return Parts("toy", runtime, tokenizer, EngineConfig(step_token_budget=32), limits, budget)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize("limit", [4, 8, 12, 32])
@pytest.mark.parametrize("room", [1, 2, 3])
def test_a_prompt_runs_to_exactly_the_end_of_the_pool(limit: int, room: int) -> None:
    prompt = [10 + index for index in range(limit - room)]
    parts = exact_parts(limit)
    with LLM.from_parts(parts) as llm:
        for max_tokens in range(1, 4):
            # Twice: cold, and over what the first run left in the cache of a pool that has no page to spare.
            for _ in range(2):
                (output,) = llm.generate(prompt, greedy(max_tokens))
                assert output.token_ids == toy_generate(prompt, min(max_tokens, room), VOCAB)
                assert output.finish_reason == "length"
    require_baseline(parts.runtime.coordinator)


def test_a_prompt_of_the_whole_limit_leaves_no_room_for_an_answer() -> None:
    with LLM.from_parts(exact_parts(8)) as llm, pytest.raises(InputTooLongError, match="the prompt has 8 tokens"):
        llm.generate([7] * 8, greedy(1))


@pytest.mark.parametrize(("limit", "pool"), [(8, 16), (16, 8)])
@pytest.mark.parametrize("room", [1, 2, 3])
def test_the_smaller_of_context_and_pool_decides(limit: int, pool: int, room: int) -> None:
    from edgellm.request import LLMGenerationRequest
    from edgellm.session.types import SessionOptions
    from edgellm.testing.session_driver import SessionDriver
    from edgellm.testing.toy_runtime import TOY_VOCAB_SIZE, ToyRuntime

    runtime = ToyRuntime(page_size=PAGE, num_pages=pool // PAGE, max_kv_capacity=limit)
    prompt = [10 + index for index in range(8 - room)]
    with runtime.open_session(SessionOptions(allow_compact_execution=True)) as session:
        driver = SessionDriver(session)
        request = LLMGenerationRequest(prompt_token_ids=prompt, sampling=greedy(100))
        assert driver.admit(request).status is AdmissionStatus.ADMITTED
        driver.run()
        assert driver.finished[1].generated_ids == toy_generate(prompt, room, TOY_VOCAB_SIZE)
    require_baseline(runtime.coordinator)
