"""Arguments of a session and of its runtime that are of a wrong kind: named, with the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from edgellm.errors import ContractViolation, InvalidArgumentError
from edgellm.request import LLMGenerationRequest
from edgellm.sampling.params import SamplingParams
from edgellm.session.types import BatchResult, FinishReason, ResidentRef, SessionOptions
from edgellm.testing.session_driver import SessionDriver
from edgellm.testing.toy_runtime import ToyRuntime

PROMPT = list(range(100, 112))


@pytest.fixture
def runtime() -> Iterator[ToyRuntime]:
    with ToyRuntime(page_size=4) as runtime:
        yield runtime


@pytest.fixture
def drive(runtime: ToyRuntime) -> Iterator[SessionDriver]:
    driver = SessionDriver(runtime.open_session(SessionOptions(allow_compact_execution=True)))
    yield driver
    driver.session.close()


@pytest.mark.parametrize("wrong", [5, True, "compact", {"allow_compact_execution": True}])
def test_a_session_opens_with_its_options_or_none(runtime: ToyRuntime, wrong: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"options is .*; pass edgellm\.session\.types\.SessionOptions"):
        runtime.open_session(wrong)
    runtime.open_session().close()  # the runtime was not taken


@pytest.mark.parametrize("wrong", [1, None, "yes"])
def test_the_options_of_a_session_are_flags(wrong: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"allow_compact_execution is .*; it must be True or False"):
        SessionOptions(allow_compact_execution=wrong)


@pytest.mark.parametrize("wrong", [5, None, (0, 1), ResidentRef("0", 1), ResidentRef(0, None)])  # type: ignore[arg-type]
def test_block_identities_are_those_of_refs(drive: SessionDriver, wrong: Any) -> None:
    with pytest.raises(
        ContractViolation, match=r"next_block_identity: ref is .*; pass the ResidentRef of an admission"
    ):
        drive.session.next_block_identity(wrong)


@pytest.mark.parametrize("gone", [ResidentRef(), ResidentRef(0, 99), ResidentRef(999, 1), ResidentRef(-5, 1)])
def test_somebody_who_left_has_no_next_block(drive: SessionDriver, gone: ResidentRef) -> None:
    admission = drive.admit(LLMGenerationRequest(prompt_token_ids=PROMPT, sampling=SamplingParams(max_tokens=2)))
    assert drive.session.next_block_identity(admission.ref) is not None
    assert drive.session.next_block_identity(gone) is None


@pytest.mark.parametrize("wrong", [5, None, [], "text", {"token_ids": []}])
def test_only_snapshots_become_responses(drive: SessionDriver, wrong: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"result is .*; pass the BatchResult of a sequence that a step"):
        drive.session.materialize(wrong, ())


@pytest.mark.parametrize("wrong", [None, 5, "stop", [5], ["a", None], [""], {"a": 1}])
def test_stop_strings_are_texts(drive: SessionDriver, wrong: Any) -> None:
    snapshot = BatchResult([1, 2], [1], 1, FinishReason.LENGTH)
    with pytest.raises(InvalidArgumentError, match=r"stop_strings is .*; pass a list or tuple of non-empty texts"):
        drive.session.materialize(snapshot, wrong)
    assert drive.session.materialize(snapshot, ["zz"]).token_ids == [2]
