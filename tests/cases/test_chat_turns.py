"""Case 15: turn 2 of a chat finds turn 1, whatever the template and the client do to the history."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from edgellm import LLM, RequestOutput, ReuseStopReason, SamplingParams
from edgellm.assembly import Parts
from edgellm.cache.types import DeploymentConfig
from edgellm.engine.config import EngineConfig
from edgellm.memory import MemoryBudget
from edgellm.plugins import load_plugins
from edgellm.prompts import PromptLimits
from edgellm.runtime.rank_runtime import LLMRankRuntime
from edgellm.testing.recount import recount
from edgellm.testing.toy import LOGIT_MASS, ToyExecutor
from edgellm.tokenization.tokenizer import Tokenizer, load_tokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from tiny_tokenizers import TEMPLATE, byte_level

if TYPE_CHECKING:
    import torch

    from edgellm.runtime.batch import RaggedBatch

PAGE = 16
MAX_LEN = 4096
NUM_PAGES = 512
SYSTEM = {"role": "system", "content": "the cat sat on the mat " * 200}  # more than 1,000 tokens of history
INJECTED = "<think>\n\n</think>\n\n"
INJECTING = TEMPLATE.replace("assistant\n{% endif", "assistant\n" + INJECTED + "{% endif")


class ScriptedExecutor(ToyExecutor):
    """The toy model, made to say what a test wrote; its state stays the exact one."""

    def __init__(self, *, vocab_size: int) -> None:
        super().__init__(vocab_size=vocab_size, num_pages=NUM_PAGES, page_size=PAGE)
        self.script: list[int] = []

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        logits = super().forward(batch)
        for row in range(len(logits)):
            logits[row] = -LOGIT_MASS
            logits[row, self.script.pop(0)] = LOGIT_MASS
        return logits


class Chat:
    """One client over one `LLM`; remembers what it shows, as clients do."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.executor = ScriptedExecutor(vocab_size=tokenizer.vocab_size)
        deployment = DeploymentConfig(
            max_batch_size=2, max_input_length=256, max_kv_capacity=MAX_LEN, page_size=PAGE, num_pages=NUM_PAGES
        )
        self.runtime = LLMRankRuntime(
            self.executor, tokenizer, deployment, plugins=load_plugins(autoload=False), model_fingerprint="toy"
        )
        self.executor.watch(self.runtime.coordinator.manager.pools)
        limits = PromptLimits(
            vocab_size=tokenizer.vocab_size, max_model_len=MAX_LEN, pool_tokens=NUM_PAGES * PAGE, headroom_tokens=1
        )
        budget = MemoryBudget(bytes_per_page=8 * PAGE, num_pages=NUM_PAGES, page_size=PAGE, max_model_len=MAX_LEN)
        self.llm = LLM.from_parts(
            Parts("toy", self.runtime, tokenizer, EngineConfig(step_token_budget=256), limits, budget)
        )
        self.history: list[dict[str, str]] = [SYSTEM]

    def turn(self, question: str, reply_ids: Sequence[int], shown: str | None = None) -> RequestOutput:
        """Ask; the model says `reply_ids`; the client keeps `shown` (default: the text of the answer)."""
        end = self.tokenizer.token_id("<|im_end|>")
        assert end is not None
        self.executor.script = [*reply_ids, end]
        self.history.append({"role": "user", "content": question})
        (output,) = self.llm.chat(self.history, SamplingParams(max_tokens=64, temperature=0.0))
        assert output.token_ids[: len(reply_ids)] == list(reply_ids)
        self.history.append({"role": "assistant", "content": output.text if shown is None else shown})
        recount(self.runtime.coordinator)
        return output

    def length(self, text: str) -> int:
        return len(self.tokenizer.encode(text, add_special_tokens=False))


@pytest.fixture
def chat(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Chat]:
    template = getattr(request, "param", TEMPLATE)
    made = Chat(load_tokenizer(byte_level(tmp_path, chat_template=template)))
    yield made
    made.llm.close()


def reused(output: RequestOutput) -> Any:
    assert output.reuse is not None
    return output.reuse


@pytest.mark.parametrize("chat", [INJECTING], indirect=True)
def test_case_15a_a_thinking_block_that_only_the_generation_prompt_has(chat: Chat) -> None:
    reply = chat.tokenizer.encode("the mat", add_special_tokens=False)
    first = chat.turn("where is it", reply)
    assert first.prompt_token_ids[-chat.length(INJECTED) :] == chat.tokenizer.encode(INJECTED, add_special_tokens=False)
    stable = len(first.prompt_token_ids) - chat.length(INJECTED)
    for question in ("and then", "why"):
        output = chat.turn(question, reply)
        report = reused(output)
        assert report.prompt_tokens > 1000
        assert (report.reused_tokens, report.stop_reason) == (stable, ReuseStopReason.TEMPLATE_TAIL)
        stable = len(output.prompt_token_ids) - chat.length(INJECTED)


def test_case_15b_thinking_that_the_client_takes_out_of_the_history(chat: Chat) -> None:
    thought = "<think>the cat the cat</think>"
    reply = chat.tokenizer.encode(thought + "the mat", add_special_tokens=False)
    first = chat.turn("where is it", reply, shown="the mat")
    matched = len(first.prompt_token_ids)
    for question in ("and then", "why"):
        output = chat.turn(question, reply, shown="the mat")
        report = reused(output)
        new = len(output.prompt_token_ids) - matched
        assert report.prompt_tokens > 1000
        assert report.reused_tokens >= matched
        assert report.computed_tokens <= new
        assert report.stop_reason is ReuseStopReason.NO_RECORD
        matched = len(output.prompt_token_ids)


def test_case_15c_a_reply_that_retokenises_differently_is_reused_up_to_the_divergent_token(chat: Chat) -> None:
    encode = chat.tokenizer.encode
    whole = encode("the", add_special_tokens=False)
    split = [*encode("t", add_special_tokens=False), *encode("he", add_special_tokens=False)]
    assert len(whole) == 1 < len(split)
    before, after = encode("cat.", add_special_tokens=False), encode("!", add_special_tokens=False)
    said = [*before, *split, *after]
    first = chat.turn("where is it", said)
    second = chat.turn("and then", said)
    divergent = len(first.prompt_token_ids) + len(before)
    assert second.prompt_token_ids[:divergent] == [*first.prompt_token_ids, *before]
    assert second.prompt_token_ids[divergent] != split[0]
    assert reused(second).reused_tokens == divergent
    assert reused(second).stop_position == divergent
    assert reused(second).stop_reason is ReuseStopReason.NO_RECORD
    third = chat.turn("why", said)
    assert reused(third).reused_tokens == len(second.prompt_token_ids) + len(before)


def test_case_15_a_history_that_says_the_same_is_reused_to_its_last_token(chat: Chat) -> None:
    """The plain case: what is left to compute is what was not there before."""
    reply = chat.tokenizer.encode("the mat", add_special_tokens=False)
    first = chat.turn("where is it", reply)
    second = chat.turn("and then", reply)
    known = len(first.prompt_token_ids) + len(reply)  # the closing token was sampled and never ran
    assert reused(second).reused_tokens == known
    again = chat.llm.generate({"prompt_token_ids": second.prompt_token_ids}, _one_token(chat))
    assert reused(again[0]).computed_tokens == 1


def _one_token(chat: Chat) -> SamplingParams:
    chat.executor.script = [5]
    return SamplingParams(max_tokens=1, temperature=0.0)
