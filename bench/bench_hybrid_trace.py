"""What is found again under pressure: the attention and the hybrid flavour beside plain LRU, in one run.

    pytest -o python_files='bench_*.py' bench/bench_hybrid_trace.py -s                   # tables and times
    pytest -o python_files='bench_*.py' bench/bench_hybrid_trace.py --benchmark-disable  # smoke test, short workloads

Workloads: the recorded conversation trace (first 1,500 requests, replies cut to 32 tokens) and a multi-turn chat; page
16, 32 running, a pool of 30 % of the distinct pages.  Plain LRU is the floor (plain Python).  The hybrid has the same
budget in all: what its snapshots take is taken from its pages (`Split`).  A hit is a prompt token that was not
computed again.  Each rule is switched off in turn; two of them the manager cannot do without, and the plain-Python
model shows what they are worth.  Model and manager must hit the same tokens first.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from bench.checkpoint_rules import Ladder, Prompt, Rules
from bench.comparison import PAGE_SIZE, alternate, report
from bench.peers.plain_checkpoints import PlainCheckpointCache
from bench.replay import FloorCache, HybridCache, OurCache, PageCache, Placement, ReplayResult, Split, replay
from bench.workloads import Turn, chat_turns, distinct_pages, trace_turns
from edgellm.cache.policy import CheckpointContext

try:
    from edgellm_hybrid.placement import place_checkpoints
except ImportError:  # not installed: the sources lie beside
    sys.path.insert(0, str(Path(__file__).parents[1] / "plugins" / "edgellm-hybrid" / "src"))
    from edgellm_hybrid.placement import place_checkpoints

POOL_SHARE = 0.30
DEFAULT_SPLIT = 0.125
WORKLOADS = ("trace", "chat", "unnamed chat")  # the last without the boundaries that a chat template gives
SPLITS = (0.05, 0.08, 0.10, 0.125, 0.15, 0.20, 0.30, 0.50)
RULES = Rules()
AIM_HYBRID = 0.90  # of plain LRU's hit rate, on the trace
BAR_HYBRID = 0.75
TAIL_TOLERANCE = 2e-3


@dataclass(frozen=True, slots=True)
class Workload:
    turns: list[Turn]
    budget: int
    slots: int
    endless: float
    lru: float

    def replay(self, cache: PageCache) -> ReplayResult:
        return replay(cache, self.turns, slots=self.slots)


@functools.cache
def workload(name: str, smoke: bool) -> Workload:
    """The turns, the budget in pages, and what an endless pool and plain LRU hit."""
    if name == "trace":
        turns = trace_turns(limit=200 if smoke else 1500)
    else:
        turns = chat_turns(sessions=100 if smoke else 2000)
        if name == "unnamed chat":
            turns = [replace(turn, boundaries=()) for turn in turns]
    distinct, endless = distinct_pages(turns, PAGE_SIZE)
    budget = int(distinct * POOL_SHARE)
    slots = 4 if smoke else 32
    floor = replay(FloorCache(budget, PAGE_SIZE), turns, slots=slots)
    return Workload(turns, budget, slots, endless, floor.hit_rate)


def plugin_places(prompt: Prompt) -> tuple[int, ...]:
    """The plugin's placement, as the coordinator asks for it."""
    context = CheckpointContext(
        num_tokens=prompt.num_tokens,
        reuse_token_length=prompt.reuse,
        known_token_length=prompt.known,
        page_size=prompt.page_size,
        interval=RULES.interval,
        template_boundaries=prompt.boundaries,
        replay_tail_length=0,
    )
    return place_checkpoints(context)


def hybrid(load: Workload, share: float, rules: Rules, place: Placement | None = None) -> HybridCache:
    return HybridCache(Split.of(load.budget, share), PAGE_SIZE, rules, place or rules.places)


def model(load: Workload, share: float, rules: Rules) -> PlainCheckpointCache:
    split = Split.of(load.budget, share)
    return PlainCheckpointCache(split.pages, split.snapshots, split.partials, PAGE_SIZE, rules)


@pytest.mark.parametrize("name", WORKLOADS[:2])
def test_attention_beside_lru(benchmark: Any, name: str) -> None:
    """The attention flavour hits what plain LRU hits: whole blocks first, then the tokens behind them."""
    load = workload(name, benchmark.disabled)
    caches = [OurCache(load.budget, PAGE_SIZE), OurCache(load.budget, PAGE_SIZE, tails=False)]
    out: list[ReplayResult] = []
    benchmark.pedantic(lambda: out.extend(load.replay(cache) for cache in caches), rounds=1)
    whole_context, whole_pages = (result.hit_rate for result in out)
    for cache in caches:
        cache.manager.check_invariants()
    rates = {"plain LRU": load.lru, "ours": whole_context, "ours without tails": whole_pages, "endless": load.endless}
    benchmark.extra_info.update({key: round(rate, 5) for key, rate in rates.items()}, pool_pages=load.budget)
    print(f"\n{name}: " + ", ".join(f"{key} {rate:.5f}" for key, rate in rates.items()))
    assert whole_pages >= load.lru * (1 - 1e-4)
    assert whole_context >= load.lru * (1 - TAIL_TOLERANCE if name != "trace" else 1)


@pytest.mark.parametrize("name", WORKLOADS)
def test_hybrid_against_model(benchmark: Any, name: str) -> None:
    """The hybrid flavour with the plugin's placement at the default split; time per turn against plain Python."""
    load = workload(name, benchmark.disabled)
    results: dict[str, ReplayResult] = {}
    caches: dict[str, Any] = {}

    def run(key: str, make: Callable[[], PageCache]) -> float:
        caches[key] = make()
        results[key] = load.replay(caches[key])
        return results[key].busy_ns / len(load.turns)

    def plain() -> float:
        return run("model", lambda: model(load, DEFAULT_SPLIT, RULES))

    peer_ns, ours_ns = alternate(
        benchmark,
        plain,
        lambda: run("ours", lambda: hybrid(load, DEFAULT_SPLIT, RULES, plugin_places)),
        rounds=3,
    )
    if "model" not in results:  # --benchmark-disable leaves out the setup
        plain()
    ours, peer = results["ours"], results["model"]
    caches["ours"].manager.check_invariants()
    assert ours.admitted == peer.admitted == len(load.turns)
    assert ours.hit_tokens == peer.hit_tokens
    if benchmark.stats is None:
        return
    assert name != "trace" or ours.hit_rate >= BAR_HYBRID * load.lru
    share = ours.hit_rate / load.lru
    facts = {"placed": caches["ours"].placed, "refused": caches["ours"].refused, "hit_rate": round(ours.hit_rate, 5)}
    ratio = report(benchmark, peer_ns, ours_ns, unit="one turn", share_of_lru=round(share, 4), **facts)
    print(
        f"\n{name}: hybrid {ours.hit_rate:.4f}, {share:.3f} of plain LRU, {ratio:.1f} times the model's speed; {facts}"
    )


def rows(load: Workload, cases: dict[str, PageCache]) -> dict[str, float]:
    """Replay each case; hit rate over plain LRU's."""
    return {label: load.replay(cache).hit_rate / load.lru for label, cache in cases.items()}


@pytest.mark.parametrize("share", [0.10, DEFAULT_SPLIT, 0.50])
@pytest.mark.parametrize("name", WORKLOADS)
def test_each_rule_switched_off(benchmark: Any, name: str, share: float) -> None:
    """Hit rate over plain LRU's with one rule less; "(model)" marks what the manager cannot switch off."""
    load = workload(name, benchmark.disabled)
    switched = {
        "ladder: last multiple only": replace(RULES, ladder=Ladder.LAST),
        "ladder: none": replace(RULES, ladder=Ladder.NONE),
        "no branch point": replace(RULES, branch=False),
        "no ends": replace(RULES, ends=False),
        "own ladder superseded too": replace(RULES, keep=False),
        "nothing superseded": replace(RULES, supersede=False),
    }
    if name == "chat":
        switched["named boundaries ignored"] = replace(RULES, boundaries=False)
    cases: dict[str, PageCache] = {"all rules": hybrid(load, share, RULES, plugin_places)}
    cases |= {label: hybrid(load, share, rules) for label, rules in switched.items()}
    cases["all rules (model)"] = model(load, share, RULES)
    cases["checkpoint LRU instead of leaf first (model)"] = model(load, share, replace(RULES, leaf_victims=False))
    if name == "trace" or benchmark.disabled:  # the chat takes minutes
        cases["no trim (model)"] = model(load, share, replace(RULES, trim=False))
    found: dict[str, float] = {}
    benchmark.pedantic(lambda: found.update(rows(load, cases)), rounds=1)
    benchmark.extra_info.update({label: round(rate, 4) for label, rate in found.items()}, split=share)
    print(f"\n{name}, {share:.1%} of the bytes for snapshots; hit rate over plain LRU's {load.lru:.4f}")
    print("".join(f"  {rate:.3f}  {label}\n" for label, rate in found.items()))
    assert found["all rules"] == found["all rules (model)"]


@pytest.mark.parametrize("name", WORKLOADS)
def test_split(benchmark: Any, name: str) -> None:
    """How the budget is best shared out between snapshots and pages."""
    load = workload(name, benchmark.disabled)
    cases: dict[str, PageCache] = {f"{share:.1%}": hybrid(load, share, RULES, plugin_places) for share in SPLITS}
    found: dict[str, float] = {}
    benchmark.pedantic(lambda: found.update(rows(load, cases)), rounds=1)
    benchmark.extra_info.update({label: round(rate, 4) for label, rate in found.items()})
    print(f"\n{name}: " + ", ".join(f"{label} {rate:.3f}" for label, rate in found.items()))
