"""Requests that hold foreign or hostile objects: only they are refused, and the session is as if they never came."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from engine_rig import WAIT, held
from hostile_values import ARRAY, MALFORMED, PROMPT, WITHOUT_A_KIND, BadValue, Strange, fields_of, said

from edgellm.cache.types import Retention
from edgellm.engine.config import EngineConfig
from edgellm.engine.engine import RequestEngine
from edgellm.errors import (
    AdmissionError,
    CallerError,
    ContractViolation,
    InvalidArgumentError,
    RequestFailed,
    UnsupportedRequestError,
)
from edgellm.prompts import PromptLimits, PromptPreparer
from edgellm.request import CancelToken, LLMGenerationRequest
from edgellm.sampling.params import SamplingParams
from edgellm.session.request_check import check_supported, read_foreign
from edgellm.session.types import AdmissionStatus, RequestId, ResidentRef, SequenceIdentity, SessionOptions
from edgellm.streaming import StreamChannel
from edgellm.testing.recount import recount, require_baseline
from edgellm.testing.scripted_session import Script, ScriptedRuntime, ScriptedSession
from edgellm.testing.session_driver import SessionDriver
from edgellm.testing.toy_runtime import toy_runtime
from edgellm.testing.toy_tokenizer import ToyTokenizer

LIMITS = PromptLimits(vocab_size=512, max_model_len=256, pool_tokens=4096, headroom_tokens=1)


def opened(**options: Any) -> SessionDriver:
    return SessionDriver(ScriptedRuntime(**options).open_session(SessionOptions(allow_compact_execution=True)))


def fingerprint(drive: SessionDriver) -> object:
    session = drive.session
    assert isinstance(session, ScriptedSession)
    session.check_invariants()
    rows = [(row.ref, row.committed, list(row.generated)) for row in session._order]
    return rows, session._slots.available(), session._next_step_id, set(session._runtime.leased), session.state


def asked(fields: dict[str, Any]) -> LLMGenerationRequest:
    return LLMGenerationRequest(sampling=SamplingParams(max_tokens=4), **fields)


# ---- the session ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", **fields_of(MALFORMED))
def test_a_malformed_request_is_an_admission_error_and_changes_nothing(fields: dict[str, Any]) -> None:
    drive = opened()
    drive.admit(asked({"prompt": "resident"}))
    before = fingerprint(drive)
    with pytest.raises(AdmissionError):
        drive.session.admit(asked(fields), RequestId(9))
    assert fingerprint(drive) == before
    assert drive.step(drive.context(1)).ok


@pytest.mark.parametrize("fields", **fields_of(WITHOUT_A_KIND))
@pytest.mark.parametrize("uniform", [False, True])
def test_a_field_of_no_known_kind_is_refused_and_changes_nothing(fields: dict[str, Any], uniform: bool) -> None:
    drive = opened(uniform_sampling=uniform)
    drive.admit(asked({"prompt": "resident"}))
    before = fingerprint(drive)
    with pytest.raises((AdmissionError, UnsupportedRequestError)):
        drive.session.admit(asked({"prompt_token_ids": PROMPT, **fields}), RequestId(9))
    assert fingerprint(drive) == before


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"prompt_token_ids": torch.tensor([3], device="meta")},
            r"prompt_token_ids is a Tensor whose values cannot be read \(.*meta.*\); pass a list of integers, or",
        ),
        ({"prompt_token_ids": [3, BadValue()]}, r"prompt_token_ids\[1\] is a BadValue; a token id is an integer"),
        (said(role=ARRAY), r"messages\[0\] has the role array\(\[1, 2\]\); known roles are system, "),
        (said(content=[{"type": ARRAY}]), r"messages\[0\]\['content'\]\[0\] is a array\(\[1, 2\]\) item; .*use text"),
        (said(content=None, tool_calls=ARRAY), r"messages\[0\]\['tool_calls'\] is a ndarray; it must be a list"),
        (said(content=None, tool_calls=[]), r"messages\[0\] has no content; give it text"),
        ({**said(), "chat_template_kwargs": 5}, "chat_template_kwargs is 5; pass a dict of variables"),
        ({**said(), "chat_template_kwargs": {1: 2}}, "chat_template_kwargs has the key 1; keys are texts"),
        ({**said(), "add_generation_prompt": "no"}, "add_generation_prompt is 'no'; it must be True or False"),
        ({"prompt": "a", "commit_policy": ARRAY}, r"commit_policy is array\(\[1, 2\]\); pass a ContextCacheCommitPo"),
        ({"prompt": "a", "disable_spec_decode": "no"}, "disable_spec_decode is 'no'; it must be True or False"),
        ({"prompt": "a", "stream_channel": "x"}, r"stream_channel is 'x'; pass StreamChannel\.create\(\), or None"),
        ({"prompt": "a", "token_callback": 5}, "token_callback is 5; pass a function of the new token ids, or None"),
    ],
)
def test_the_refusal_names_field_value_and_remedy(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(AdmissionError, match=message):
        opened().session.admit(asked(fields), RequestId(1))


@pytest.mark.parametrize("kind", [ValueError, SystemExit, GeneratorExit, StopIteration, Strange])
def test_whatever_the_tokenizer_or_the_sampler_raises_refuses_the_request_alone(
    kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise kind("no such merge")

    drive = opened()
    before = fingerprint(drive)
    for owner, name in ((ToyTokenizer, "encode"), (ScriptedSession, "_make_sampling")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, broken)
            with pytest.raises(AdmissionError, match="no such merge"):
                drive.admit(asked({"prompt": "hello"}))
        assert fingerprint(drive) == before
    assert drive.admit(asked({"prompt": "hello"})).status is AdmissionStatus.ADMITTED


def test_an_interrupt_of_the_process_passes() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read_foreign(interrupted)


@pytest.mark.parametrize("request_id", [None, "x", 1.5, float("nan"), True, 2**64, np.int64(2), [], BadValue()])
def test_a_request_id_is_an_integer_of_64_bits(request_id: Any) -> None:
    drive = opened(max_batch_size=1)  # also where every slot is taken
    drive.admit(asked({"prompt": "resident"}))
    before = fingerprint(drive)
    with pytest.raises(ContractViolation, match=r"request id is .*; ids are integers of 64 bits that start at 1"):
        drive.session.admit(asked({"prompt": "a"}), request_id)
    assert fingerprint(drive) == before


@pytest.mark.parametrize("token", ["x", 1.5, 0, True, [], object(), BadValue()])
def test_a_cancel_token_is_one_or_none(token: Any) -> None:
    drive = opened()
    before = fingerprint(drive)
    with pytest.raises(ContractViolation, match=r"cancel_token is .*; pass a CancelToken, or None"):
        drive.session.admit(asked({"prompt": "a"}), RequestId(1), token)
    assert fingerprint(drive) == before
    assert drive.admit(asked({"prompt": "a"}), cancel_token=CancelToken()).status is AdmissionStatus.ADMITTED


@pytest.mark.parametrize("request_", [None, "x", 5, {}, BadValue()])
def test_what_is_admitted_is_a_request(request_: Any) -> None:
    drive = opened()
    before = fingerprint(drive)
    with pytest.raises(ContractViolation, match=r"request is .*; pass an LLMGenerationRequest"):
        drive.session.admit(request_, RequestId(1))
    assert fingerprint(drive) == before
    with pytest.raises(InvalidArgumentError, match=r"request is .*; pass an LLMGenerationRequest"):
        check_supported(request_)


@pytest.mark.parametrize("ref", [None, 5, ResidentRef(1.5, 1), ResidentRef(None, 1), ResidentRef(0, "1")])  # type: ignore[arg-type]
def test_a_ref_of_a_wrong_type_is_a_violation(ref: Any) -> None:
    drive = opened()
    drive.admit(asked({"prompt": "a"}))
    with pytest.raises(ContractViolation, match=r"attach_stream: ref is .*; pass the ResidentRef of an admission"):
        drive.session.attach_stream(ref, StreamChannel.create())


def test_a_stream_or_a_list_of_a_wrong_type_is_a_violation() -> None:
    drive = opened()
    ref = drive.admit(asked({"prompt": "a"})).ref
    with pytest.raises(ContractViolation, match=r"attach_stream: channel is 'x'; pass StreamChannel\.create\(\)"):
        drive.session.attach_stream(ref, "x")  # type: ignore[arg-type]
    with pytest.raises(ContractViolation, match=r"copy_residents: out is \(\); pass a list"):
        drive.session.copy_residents(())  # type: ignore[arg-type]


# ---- plans ----------------------------------------------------------------------------------------------


class _BadPlan(list):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        raise Strange("looked at")


@pytest.mark.parametrize("plan", [None, 5, "x", object(), (row for row in ()), [None], ["x"], [5], _BadPlan([1])])
def test_a_plan_is_a_sequence_of_descriptors(plan: Any) -> None:
    runtime = toy_runtime("attention")
    drive = SessionDriver(runtime.open_session(SessionOptions(allow_compact_execution=True)))
    drive.admit(asked({"prompt": "a"}))
    before = recount(runtime.coordinator)
    with pytest.raises(ContractViolation, match=r"plan type: (the plan|plan\[0\]) "):
        drive.session.execute(plan)
    assert recount(runtime.coordinator) == before
    assert drive.step(drive.context(1)).ok
    drive.session.close()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((name, value) for name in ("query_length", "past_length") for value in (6.0, None, "6", True, np.int64(6))),
        *(("select_last_token_logits", value) for value in (1, "yes", None)),
        *(("work", value) for value in (None, "context", 0)),
        *(("identity", value) for value in (None, (1, 2))),
    ],
)
def test_a_descriptors_fields_have_their_types(field: str, value: Any) -> None:
    drive = opened()
    drive.admit(asked({"prompt_token_ids": [7] * 6}))
    row = drive.context(1)
    object.__setattr__(row, field, value)
    before = fingerprint(drive)
    with pytest.raises(ContractViolation, match=rf"plan type: plan\[0\] has {field} "):
        drive.session.execute([row])
    assert fingerprint(drive) == before
    assert drive.step(drive.context(1)).ok


@pytest.mark.parametrize(
    ("identity", "name"),
    [
        ((1.0, ResidentRef(0, 1)), "request_id"),
        ((True, ResidentRef(0, 1)), "request_id"),
        ((1, (0, 1)), "resident"),
        ((1, ResidentRef(False, 1)), "slot"),
        ((1, ResidentRef(0, 1.0)), "epoch"),  # type: ignore[arg-type]
    ],
)
def test_an_identity_has_its_types(identity: tuple[Any, Any], name: str) -> None:
    drive = opened()
    drive.admit(asked({"prompt": "a"}))
    row = drive.context(1)
    object.__setattr__(row, "identity", SequenceIdentity(*identity))
    before = fingerprint(drive)
    with pytest.raises(ContractViolation, match=rf"plan type: plan\[0\] has {name} "):
        drive.session.execute([row])
    assert fingerprint(drive) == before


# ---- the engine -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("uniform", [False, True])
def test_malformed_requests_harm_nobody_else(start: Any, brake: Any, uniform: bool) -> None:
    runtime = ScriptedRuntime(script=Script(next_token=brake), uniform_sampling=uniform)
    engine = start(runtime, EngineConfig(max_replays=0))
    resident = held(engine, brake)
    accepted: list[Any] = []
    refused: list[str] = []
    cases = MALFORMED + [(name, {"prompt_token_ids": PROMPT, **fields}) for name, fields in WITHOUT_A_KIND]
    for name, fields in cases:
        try:
            accepted.append(engine.submit(asked(fields)))
        except CallerError:
            refused.append(name)
    brake.release()
    for handle in accepted:
        with pytest.raises(RequestFailed):
            handle.get(WAIT)
    assert len(resident.get(WAIT).token_ids) == 50
    assert len(runtime.sessions) == 1
    assert accepted
    assert {name for name, _ in WITHOUT_A_KIND} <= set(refused)  # they are what other requests are compared by


def test_a_salt_that_cannot_be_hashed_harms_nobody_while_neighbours_are_sought(start: Any, brake: Any) -> None:
    """With fewer seats than requests, those that begin like a resident are looked for by a key that holds the salt."""
    runtime = ScriptedRuntime(script=Script(next_token=brake), max_batch_size=2)
    engine = start(runtime, EngineConfig(max_replays=0))
    first = held(engine, brake)
    long = [[5 + seed] * 70 for seed in range(8)]
    residents = [engine.submit(asked({"prompt_token_ids": ids})) for ids in long]
    bad = engine.submit(asked({"prompt_token_ids": long[0], "cache_salt": ["x"]}))
    more = [engine.submit(asked({"prompt_token_ids": ids})) for ids in long]
    brake.release()
    assert len(first.get(WAIT).token_ids) == 50
    for handle in residents + more:
        assert len(handle.get(WAIT).token_ids) == 4
    with pytest.raises(RequestFailed, match="cache_salt is a list; it must be text"):
        bad.get(WAIT)
    assert len(runtime.sessions) == 1


@pytest.mark.parametrize("ttl", [np.float16(60), np.float32(60), np.float64(60), 10**400, 1e308, 5e-324])
def test_a_time_to_live_of_any_number_is_served(ttl: Any) -> None:
    runtime = toy_runtime("attention")
    engine = RequestEngine(runtime, EngineConfig(max_replays=0))
    try:
        handle = engine.submit(asked({"prompt_token_ids": PROMPT, "retention": Retention(ttl_seconds=ttl)}))
        assert len(handle.get(WAIT).token_ids) == 4
        assert engine.metrics().session_reopens == 0
    finally:
        engine.shutdown()
    require_baseline(runtime.coordinator)


# ---- the caller's thread --------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", **fields_of([case for case in MALFORMED if not case[0].startswith("salt")]))
def test_a_prompt_that_cannot_be_read_is_refused_before_it_is_submitted(fields: dict[str, Any]) -> None:
    with pytest.raises((AdmissionError, InvalidArgumentError), match=r"^prompts\[2\]: "):
        PromptPreparer(ToyTokenizer(), LIMITS).prepare(asked(fields), "prompts[2]")


def test_only_python_integers_leave_the_preparation() -> None:
    request = asked(
        {"prompt": "hello", "checkpoint_boundaries": np.array([2, 9], np.uint8), "replay_tail_length": np.uint8(1)}
    )
    prompt = PromptPreparer(ToyTokenizer(), LIMITS).prepare(request, "").prompt
    assert (prompt.checkpoint_boundaries, prompt.replay_tail_length) == ((2,), 1)
    assert {type(value) for value in (*prompt.checkpoint_boundaries, prompt.replay_tail_length)} == {int}
