"""Requests through a real engine over the toy model, cancelled in every state, under injected faults."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from plugin_policies import PLUGINS

from edgellm.errors import InvariantError, StepDeviceError
from edgellm.plugins import load_plugins
from edgellm.session.types import RequestId, ResidentRef, ScheduledSequenceDescriptor, SequenceIdentity, SequenceWork
from edgellm.testing.engine_traffic import STATES, EngineTraffic, Errand, main, run_traffic, traffic_config
from edgellm.testing.toy_driver import FLAVOURS


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_every_request_ends_once_with_its_own_text_and_nothing_leaks(flavour: str) -> None:
    report = run_traffic(
        requests=300,
        seed=1,
        flavour=flavour,
        plugins=load_plugins(extra=PLUGINS, autoload=False, strict=True),
    )
    assert sum(report.outcomes.values()) == 300
    assert min(report.outcomes["completed"], report.outcomes["cancelled"]) > 50
    assert report.exact_texts == report.outcomes["completed"]
    assert [state for state in STATES if not report.cancels[state]] == []
    assert report.most_late_steps <= 1
    assert report.refusals + report.failures > 0
    assert report.sessions == 1 + report.refusals + report.failures


def test_a_wrong_text_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "edgellm.testing.toy_runtime.ToyFlavourRuntime.solo", lambda self, prompt, num_tokens: [7] * num_tokens
    )
    with pytest.raises(InvariantError, match=r"mistakes, among them.*alone it is"):
        run_traffic(requests=20, seed=1)


def test_an_outcome_that_is_announced_twice_is_found() -> None:
    traffic = EngineTraffic(requests=20, seed=1)
    traffic.errands[3].endings = 1
    with pytest.raises(InvariantError, match=r"request 3 .*2 outcomes"):
        traffic.run()


def test_a_cancel_that_nobody_asked_for_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Errand, "may_be_cancelled", False)
    with pytest.raises(InvariantError, match="it was cancelled and nobody asked for that"):
        run_traffic(requests=20, seed=1)


def test_a_failure_that_nobody_injected_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "edgellm.testing.engine_traffic.traffic_config",
        lambda rng, *, mixed: replace(traffic_config(rng, mixed=mixed), max_replays=0),
    )
    traffic = EngineTraffic(requests=20, seed=1)
    for errand in traffic.errands.values():
        errand.cancel_at, errand.caller = None, "get"
    traffic.runtime.executor.fail_next(StepDeviceError("by itself"))
    with pytest.raises(InvariantError, match=r"it failed by itself: .*by itself"):
        traffic.run()


@pytest.mark.parametrize(("field", "word"), [("replays", "max_replays"), ("overtaken", "max_overtakes")])
def test_a_limit_that_is_not_kept_is_found(field: str, word: str) -> None:
    traffic = EngineTraffic(requests=20, seed=1)
    collect = traffic._collect

    def collect_and_spoil(errand: Errand) -> None:
        collect(errand)
        setattr(errand.handle._record, field, 99)

    traffic._collect = collect_and_spoil  # type: ignore[method-assign]
    with pytest.raises(InvariantError, match=f"99 times, {word} is"):
        traffic.run()


def test_a_seat_that_is_not_given_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    traffic = EngineTraffic(requests=10, seed=1)
    monkeypatch.setattr("edgellm.testing.engine_traffic.SEATS", 9)
    with pytest.raises(InvariantError, match="8 of 9 seats are free"):
        traffic.run()
    traffic.engine.shutdown()
    traffic.runtime.close()


def test_the_command_prints_a_report(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("logging.disable", lambda level: None)
    assert main(["--requests", "60", "--seed", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("attention: 60 requests in ")
    assert "max_overtakes" in lines[1]
    assert "cancels by state: queued " in lines[3]


def test_the_seed_chooses_the_options_and_every_choice_comes_up() -> None:
    configs = [traffic_config(random.Random(seed), mixed=True) for seed in range(40)]
    assert configs == [traffic_config(random.Random(seed), mixed=True) for seed in range(40)]
    assert {config.max_replays for config in configs} == {0, 1, 3}
    assert {config.scheduling.max_overtakes for config in configs} == {0, 2, 16}
    assert {config.scheduling.prefix_aware for config in configs} == {False, True}
    assert {config.scheduling.step_time_budget_ms for config in configs} == {None, 0.5, 5.0, 50.0}


def test_a_step_without_a_forward_has_no_middle_to_be_cancelled_in() -> None:
    traffic = EngineTraffic(requests=1, seed=1)
    errand = traffic.errands[1]
    errand.cancel_at = "inside a step"
    work = ScheduledSequenceDescriptor(
        SequenceIdentity(RequestId(5), ResidentRef(0, 1)), SequenceWork.CONTEXT, query_length=4, past_length=0
    )
    traffic._seated[5] = (errand, 0)
    for _ in range(3):
        traffic.before_step([work], compact=False)
    assert (errand.hit, errand.steps_after_cancel) == (False, 0)
    traffic.engine.shutdown()
    traffic.runtime.close()
