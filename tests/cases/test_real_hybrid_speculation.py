"""Cases 16 to 20 on real models with tiny random weights: prompt lookup and MTP on a hybrid, and EAGLE at the junction.

Acceptance is scripted where a case says how long the runs are; the draft runs as it is, and its chains are changed
before they are verified.  Texts and recurrent state must be those of plain decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from decoder_plugins import use_decoder_plugins
from helped_drafts import ScriptedDraft
from real_hybrid import NUM_DRAFTS, SPECULATIVE, RealHybrid, random_tokens, require_same_states
from tiny_drafts import PAIRS, TinyPair
from tiny_model import write_tiny_qwen_hybrid

from edgellm import LLM, SamplingParams, SchedulingOptions, SpeculativeOptions
from edgellm.errors import RequestCancelled, RequestTimedOut
from edgellm.outputs import RequestOutput
from edgellm.request import LLMGenerationRequest

EVERY_DECODER = pytest.mark.parametrize("flavour", SPECULATIVE)


@pytest.fixture(autouse=True)
def plugins_of_this_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    use_decoder_plugins(monkeypatch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen_hybrid(tmp_path_factory.mktemp("hybrid"))


@EVERY_DECODER
@pytest.mark.parametrize("leaving", range(4))
def test_case_16_accepted_counts_follow_the_request(folder: Path, flavour: str, leaving: int) -> None:
    """vllm-project/vllm #51571: four requests accept 1, 3, 2, 0; one leaves early, and a fifth takes its place.

    Expect: texts and states of plain decoding, and of each request as many accepted tokens as its own script gives.
    """
    prompts = [random_tokens(50 + number, 7 + number) for number in range(5)]
    accepts = [1, 3, 2, 0, 2]
    lengths = [25] * 4 + [13]
    lengths[leaving] = 13
    with RealHybrid(folder, "plain") as twin:
        wanted = [twin.ask(prompt, 25, cold=True).token_ids for prompt in prompts]
        with RealHybrid(folder, flavour) as llm:
            scripts = {tuple(prompt): (count,) for prompt, count in zip(prompts, accepts, strict=True)}
            ScriptedDraft(llm.llm, list(zip(prompts, wanted, strict=True)), scripts)
            handles = [llm.submit(*each, cold=True) for each in zip(prompts, lengths, strict=True)]
            answers = [handle.get(60) for handle in handles]
        require_same_states(llm, twin, at_least=40)
    for answer, text, count, length in zip(answers, wanted, accepts, lengths, strict=True):
        assert answer.token_ids == text[:length]
        rounds = (length - 1) // (count + 1)  # a multiple: every script divides 12 and 24
        assert answer.accepted_draft_tokens == rounds * count


@EVERY_DECODER
@pytest.mark.parametrize("restored", [False, True])
def test_case_17_a_rollback_restores_all_of_the_state(folder: Path, flavour: str, restored: bool) -> None:
    """ggml-org/llama.cpp PR #28123: K = 3; rejections at every place, twice in a row, right after a restore too."""
    prompt, script = random_tokens(70, 21), (0, 0, 1, 1, 2, 2, 3, 3, 2, 1, 0, 3)
    length = 1 + sum(count + 1 for count in script)
    with RealHybrid(folder, "plain") as twin:
        wanted = twin.ask(prompt, length + 4, cold=True).token_ids
        with RealHybrid(folder, flavour) as llm:
            ScriptedDraft(
                llm.llm, [(prompt, wanted), (prompt[:17], [])], {tuple(prompt): script, tuple(prompt[:17]): (0,)}
            )
            if restored:
                llm.ask(prompt[:17], 1, boundaries=[16])
            answer = llm.ask(prompt, length, cold=not restored)
        assert answer.reuse.reused_tokens in ((16, 17) if restored else (0,))
        assert answer.token_ids == wanted[:length]
        assert answer.accepted_draft_tokens == sum(script)
        require_same_states(llm, twin, at_least=len(script))


@EVERY_DECODER
def test_case_18_pages_reserved_for_drafts_come_back(folder: Path, flavour: str) -> None:
    """sgl-project/sglang-jax #1147: requests of 37 tokens in turn, ended in four ways; publication off.

    Expect: the pools are back at the same numbers after each, and no more pages are taken than
    ceil((L + out + K + 1) / B) + 1.
    """
    length, output, page = 11, 37, 8
    with RealHybrid(folder, flavour) as llm:
        before = llm.recount_idle()
        prompts = [random_tokens(80 + number, length) for number in range(24)]
        text = llm.llm.tokenizer.decode(llm.ask(prompts[0], output, cold=True).token_ids)
        for number, prompt in enumerate(prompts):
            end_somehow(llm, number % 4, prompt, output, stop=text[10:12])
            assert llm.recount_idle() == before
        assert llm.most_pages <= -(-(length + output + NUM_DRAFTS + 1) // page) + 1


def end_somehow(llm: RealHybrid, way: int, prompt: Sequence[int], output: int, *, stop: str) -> None:
    """By its length, by a stop string or its length, by a cancel in the middle, by its deadline."""
    if way == 0:
        assert len(llm.ask(prompt, output, cold=True).token_ids) == output
    elif way == 1:
        llm.ask(prompt, output, cold=True, stop=stop)
    elif way == 2:
        handle = llm.submit(prompt, output, cold=True)
        next(iter(handle.stream()))
        handle.cancel()
        with pytest.raises(RequestCancelled):
            handle.get(60)
    else:
        with pytest.raises(RequestTimedOut):
            llm.ask(prompt, output, cold=True, timeout_seconds=0.005)


@pytest.mark.parametrize("spacing", [8, 24])
@pytest.mark.parametrize("count", range(1, 5))
def test_case_19_looking_ahead_costs_no_checkpoint(folder: Path, spacing: int, count: int) -> None:
    """vllm-project/vllm #53670, #54360: prompts of nS + 1 tokens, each sent twice, with MTP and without.

    Expect: with MTP as much is reused, and what is asked again says the same.
    """
    prompt = random_tokens(90 + count, count * spacing + 1)
    ends = [spacing * number for number in range(1, count + 1)]
    answers = {}
    for flavour in ("plain", "lookup", "mtp"):
        with RealHybrid(folder, flavour) as llm:
            first, second = (llm.ask(prompt, 5, boundaries=ends) for _ in range(2))
        assert first.token_ids == second.token_ids
        answers[flavour] = second.token_ids, second.reuse.reused_tokens
    assert answers["plain"][1] == count * spacing
    assert answers["lookup"] == answers["mtp"] == answers["plain"]


class Proposals:
    """What a decoder proposes, round by round."""

    def __init__(self, llm: LLM) -> None:
        self.rounds: list[list[int]] = []
        decoder = llm._frontend.open_runtime("Proposals").decoder
        propose = decoder.propose  # type: ignore[attr-defined]

        def noting(executor: object, batch: object, rows: Sequence[int], limits: Sequence[int]) -> list[list[int]]:
            chains: list[list[int]] = propose(executor, batch, rows, limits)
            self.rounds += [list(chain) for chain in chains]
            return chains

        decoder.propose = noting  # type: ignore[attr-defined]


@pytest.mark.parametrize(("page", "chunk"), [(1, 0), (2, 16), (16, 0), (16, 16)])
@pytest.mark.parametrize("name", ["eagle", "mtp"])
def test_case_20_the_junction_entry_is_computed_with_its_own_next_token(
    tmp_path_factory: pytest.TempPathFactory, name: str, page: int, chunk: int
) -> None:
    """sgl-project/sglang PR #10846: prefix + a is published, prefix + b asks; pages of 1, 2 and 16 tokens.

    Expect: the proposals of every round, and so the acceptance over 120 tokens, are those of the cold twin.
    """
    pair = PAIRS[name](tmp_path_factory.mktemp(name), vocab_size=16)
    shared, a, b = (random_tokens(seed, count, vocab_size=16) for seed, count in ((97, 33), (98, 6), (99, 6)))
    warm = converse(pair, [(shared + a, 3), (shared + b, 120)], page, chunk)
    cold = converse(pair, [(shared + b, 120)], page, chunk)
    assert warm[0].reuse.reused_tokens >= 32
    assert cold[0].reuse.reused_tokens == 0
    assert warm[0].token_ids == cold[0].token_ids
    assert warm[1] == cold[1]
    assert 5 < warm[0].accepted_draft_tokens == cold[0].accepted_draft_tokens
    assert warm[0].accepted_draft_tokens < warm[0].proposed_draft_tokens


def converse(
    pair: TinyPair, asked: Sequence[tuple[list[int], int]], page: int, chunk: int
) -> tuple[RequestOutput, list[list[int]]]:
    """The answer to the last prompt, and what was proposed for it."""
    speculative = SpeculativeOptions(decoder=pair.decoder, draft=pair.draft, num_drafts=NUM_DRAFTS, adaptive=False)
    scheduling = SchedulingOptions(max_prompt_step_tokens=chunk)
    options = {"kv_budget": 4096, "page_size": page, "max_batch_size": 2, "scheduling": scheduling}
    with LLM(pair.model, device="cpu", speculative=speculative, **options) as llm:
        proposals = Proposals(llm)
        for prompt, length in asked:
            proposals.rounds.clear()
            request = LLMGenerationRequest(
                prompt_token_ids=prompt,
                sampling=SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True),
                checkpoint_boundaries=[33],
            )
            output = llm._frontend.submit(request).get(60)
    return output, proposals.rounds
