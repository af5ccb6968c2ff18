"""Engine, session, cache and the CUDA executor together, its kernels replaced by their references, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from idle_rounds import AheadCounts
from reference_placement import ReferencePlacement, make_engine
from tiny_model import write_tiny_llama

from edgellm import Engine, SamplingParams
from edgellm.cache.coordinator import ContextCacheCoordinator
from edgellm.errors import RequestCancelled
from edgellm.models.device_attention import AttentionMode
from edgellm.runtime.placement import CpuPlacement
from edgellm.testing.recount import recount

KV_TOKENS = 384


@pytest.fixture(scope="module")
def engines(tiny_model_dir: Path) -> Iterator[tuple[Engine, Engine]]:
    """(over the CUDA executor with references, over the CPU executor); the same weights and options."""
    made = [
        make_engine(tiny_model_dir, placement, kv_budget=KV_TOKENS, max_batch_size=3)
        for placement in (ReferencePlacement, CpuPlacement)
    ]
    yield made[0], made[1]
    for engine in made:
        engine.shutdown()


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


PROMPTS = [
    [1 + (index * 31 + place * 7) % 250 for place in range(length)] for index, length in enumerate((5, 41, 70, 18))
]


def test_batched_chunked_and_reused_answers_equal_those_of_the_cpu_executor(engines: tuple[Engine, Engine]) -> None:
    """More prompts than seats, chunks beside decode rows, a shared beginning, and the same prompts again."""
    prompts = [*PROMPTS, [*PROMPTS[2][:50], 9, 9, 9]]
    ours, theirs = (
        [[output.token_ids for output in engine.generate(prompts, greedy(12))] for _ in range(2)] for engine in engines
    )
    assert ours == theirs
    assert ours[0] == ours[1]
    reused = engines[0].metrics().cache.reused_tokens
    assert reused == engines[1].metrics().cache.reused_tokens > 0


def test_sampling_and_logprobs_pass_through(engines: tuple[Engine, Engine]) -> None:
    params = SamplingParams(max_tokens=8, temperature=0.9, top_p=0.8, seed=11, logprobs=2, ignore_eos=True)
    ours, theirs = (engine.generate(PROMPTS[:2], params) for engine in engines)
    assert [output.token_ids for output in ours] == [output.token_ids for output in theirs]
    assert all(output.logprobs is not None and len(output.logprobs) == 8 for output in ours)


def test_a_cancelled_stream_gives_its_pages_back(engines: tuple[Engine, Engine]) -> None:
    engine = engines[0]
    request = engine.submit(PROMPTS[1], greedy(200), stream=True)
    chunks = request.stream().chunks()
    assert next(chunks).token_ids
    request.cancel()
    with pytest.raises(RequestCancelled):
        request.get(30.0)
    engine.generate([PROMPTS[0]], greedy(2))  # the cancel is seen at a step boundary before this one ends
    assert engine._runtime is not None
    assert recount(engine._runtime.coordinator).leased == 0


def test_steps_run_ahead_across_pages(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that cross pages at different times: what a step needs one token later is leased before it is due."""
    counts = AheadCounts(monkeypatch)
    prompts = [PROMPTS[1][:length] for length in (3, 10, 14)]
    with make_engine(tiny_model_dir, kv_budget=KV_TOKENS, max_batch_size=3) as engine:
        engine.generate(prompts, greedy(40), use_cache=False)
        assert engine._runtime is not None
        assert recount(engine._runtime.coordinator).leased == 0
    assert counts.taken == counts.ahead >= 36  # three prompts take a few steps to be under way


def test_pages_leased_early_are_those_that_were_reserved(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that holds exactly what all residents may come to: no page more is taken, and nobody goes without."""
    counts = AheadCounts(monkeypatch)
    most = []
    complete = ContextCacheCoordinator.complete_decode_step

    def watched(coordinator: ContextCacheCoordinator, *given: Any, **named: Any) -> Any:
        most.append(recount(coordinator).leased)
        return complete(coordinator, *given, **named)

    monkeypatch.setattr(ContextCacheCoordinator, "complete_decode_step", watched)
    # 9 + 24 - 1 tokens have state in the end: 4 pages of 8 each.
    with make_engine(tiny_model_dir, kv_budget=8 * 8, max_batch_size=2, max_model_len=40) as engine:
        outputs = engine.generate([PROMPTS[1][:9], PROMPTS[2][:9]], greedy(24), use_cache=False)
        assert [len(output.token_ids) for output in outputs] == [24, 24]
        assert [output.finish_reason for output in outputs] == ["length"] * 2
    assert max(most) == 8
    assert counts.taken > 18


class SplitPlacement(ReferencePlacement):
    """Decode rows have an operator of their own, as in 16-bit types."""

    mode = AttentionMode.SPLIT


def test_requests_with_one_long_prompt_read_its_pages_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the cache lets requests lease together is what decode rows attend to together; the tokens stay."""
    monkeypatch.setattr("edgellm.runtime.shared_prefix.MIN_SAVED_TOKENS", 16_384)
    folder = write_tiny_llama(
        tmp_path, head_dim=64, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=4096
    )
    prompt = [1 + (place * 7) % 250 for place in range(2_400)]
    prompts = [[*prompt, *(40 + index + place for place in range(1 + index))] for index in range(9)]
    answers = []
    for placement in (SplitPlacement, CpuPlacement):
        engine = make_engine(folder, placement, kv_budget=4_000, max_batch_size=9, max_model_len=2_600)
        engine.generate([prompts[0]], greedy(1))
        answers.append([output.token_ids for output in engine.generate(prompts, greedy(4))])
        sharing = engine.metrics().sharing
        engine.shutdown()
        assert (sharing.steps > 0) == (placement is SplitPlacement)
        assert sharing.tokens_saved >= (sharing.rows - sharing.groups) * 2_352  # 16,384 / 7, in whole pages
    assert answers[0] == answers[1]
