"""The checkpoints that this tree's plugins hold, on the models they are for; skipped where a tree lacks the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from decoder_plugins import PLUGINS

from edgellm import LLM, SamplingParams
from edgellm.plugins import load_plugins
from edgellm.shipped import FILES, ShippedCheckpoint

MEGABYTE = 1_000_000
MOST_MEGABYTES = {"eagle": 25, "shared_kv_mtp": 16, None: 16}
TALKS = ["What does the word 'harbour' mean?", "List three facts about the sea."]
KEPT = 0.25  # of the proposals; noise keeps next to none

SHIPPED = load_plugins(extra=PLUGINS, autoload=False, strict=True).shipped
RUNNABLE = [
    pytest.param(each, id=each.name, marks=pytest.mark.skipif(not each.is_present, reason=each.remedy))
    for each in SHIPPED
]
DRAFTS = [param for param, each in zip(RUNNABLE, SHIPPED, strict=True) if each.decoder is not None]
MODELS = [param for param, each in zip(RUNNABLE, SHIPPED, strict=True) if each.decoder is None]


@pytest.fixture(autouse=True)
def plugins_of_this_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_plugins(extra=PLUGINS, autoload=False, strict=True)
    monkeypatch.setattr("edgellm.plugins.load_plugins", lambda: loaded)


def said(model: str | Path, speculative: str | None) -> list[Any]:
    params = SamplingParams(max_tokens=24, temperature=0.0)
    with LLM(model, device="cpu", dtype="float32", kv_budget=2048, speculative=speculative) as llm:
        return [llm.chat([{"role": "user", "content": talk}], params)[0] for talk in TALKS]


def check(model: str | Path, decoder: str) -> None:
    """Equal texts, and proposals that are kept."""
    plain, fast = said(model, None), said(model, decoder)
    assert [output.token_ids for output in fast] == [output.token_ids for output in plain]
    proposed = sum(output.proposed_draft_tokens for output in fast)
    assert proposed > 10
    assert sum(output.accepted_draft_tokens for output in fast) > KEPT * proposed


def test_what_the_plugins_bring() -> None:
    assert [(each.name, each.decoder) for each in SHIPPED] == [
        ("smollm2-135m-instruct-eagle3", "eagle"),
        ("edgellm-hybrid-7m", None),
        ("smollm2-135m-instruct-assistant", "shared_kv_mtp"),
    ]


@pytest.mark.parametrize("each", SHIPPED, ids=lambda each: each.name)
def test_each_has_its_card_and_fits_its_package(each: ShippedCheckpoint) -> None:
    assert len({(each.folder / name).is_file() for name in FILES}) == 1, "both files, or none"
    card = (each.folder / "MODEL_CARD.md").read_text("utf-8")
    assert "## Training data" in card
    assert "## Licence" in card
    assert "WordNet 3.0 Copyright 2006 by Princeton University" in (each.folder / "NOTICE").read_text("utf-8")
    size = sum(path.stat().st_size for path in each.folder.iterdir())
    assert size < MOST_MEGABYTES[each.decoder] * MEGABYTE


@pytest.mark.model
@pytest.mark.parametrize("each", DRAFTS)
def test_a_draft_serves_the_default_model(each: ShippedCheckpoint, default_model: Path) -> None:
    check(default_model, str(each.decoder))


@pytest.mark.parametrize("each", MODELS)
def test_a_model_runs_with_its_head(each: ShippedCheckpoint) -> None:
    check(each.name, "mtp")
