"""Numbered scheduler behaviours of streams, through a whole engine: characters and stop strings across chunks."""

from __future__ import annotations

import pytest

from edgellm.engine.engine import RequestEngine
from edgellm.request import LLMGenerationRequest
from edgellm.sampling.params import SamplingParams
from edgellm.session.types import FinishReason
from edgellm.testing.scripted_session import Script, ScriptedRuntime
from edgellm.testing.toy_tokenizer import EOS_ID

WAIT = 20


def byte_tokens(data: bytes) -> list[int]:
    return [2 + value for value in data]


def streamed(tokens: list[int], *, interval: int = 1, **sampling: object) -> tuple[list[str], str, FinishReason]:
    """(texts of the chunks, text of the answer, finish reason) of one scripted request."""
    runtime = ScriptedRuntime(script=Script(tokens={1: tokens}))
    with RequestEngine(runtime) as engine:
        params = SamplingParams(max_tokens=len(tokens), **sampling)  # type: ignore[arg-type]
        handle = engine.submit(LLMGenerationRequest(prompt="abc", sampling=params))
        chunks = list(handle.stream(stream_interval=interval))
        response = handle.get(WAIT)
    assert [token for chunk in chunks for token in chunk.token_ids] == response.token_ids
    return [chunk.text for chunk in chunks], response.text, response.finish_reason


@pytest.mark.parametrize("interval", [1, 2, 3])
@pytest.mark.parametrize("text", ["aé", "€b", "x😀y"])
def test_behaviour_44_a_character_over_several_tokens_arrives_whole(text: str, interval: int) -> None:
    texts, answer, reason = streamed([*byte_tokens(text.encode()), EOS_ID], interval=interval)
    assert "".join(texts) == answer == text
    assert not [piece for piece in texts if "�" in piece]
    assert reason is FinishReason.END_ID


def test_behaviour_44_a_truncated_character_becomes_one_replacement_at_the_end() -> None:
    texts, answer, reason = streamed(byte_tokens("a€".encode()[:-1]))
    assert answer == "a�"
    assert "".join(texts) == answer
    assert texts[-1].endswith("�")
    assert reason is FinishReason.LENGTH


@pytest.mark.parametrize("interval", [1, 2, 5])
@pytest.mark.parametrize("stop", ["STOP", "OPxy", "z"])
def test_behaviour_45_a_stop_string_over_several_chunks_is_never_emitted(stop: str, interval: int) -> None:
    tokens = byte_tokens(b"goSTOPxyz")
    texts, answer, reason = streamed(tokens, interval=interval, stop=[stop])
    assert "".join(texts) == answer == "goSTOPxyz"[: "goSTOPxyz".index(stop)]
    assert reason is FinishReason.STOP_WORDS


def test_behaviour_45_text_that_only_began_like_a_stop_string_is_released() -> None:
    texts, answer, _ = streamed(byte_tokens(b"goSTOxSTO"), stop=["STOP"])
    assert "".join(texts) == answer == "goSTOxSTO"
