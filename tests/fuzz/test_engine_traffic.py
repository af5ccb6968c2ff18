"""Requests through a real engine over the toy model, cancelled in every state, under injected faults."""

from __future__ import annotations

import pytest
from plugin_policies import PLUGINS

from edgellm.errors import InvariantError
from edgellm.plugins import load_plugins
from edgellm.testing.engine_traffic import STATES, EngineTraffic, main, run_traffic
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
    assert "cancels by state: queued " in lines[2]
