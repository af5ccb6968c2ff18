"""Metrics are printed one a line."""

from __future__ import annotations

from edgellm.cache.metrics import ContextCacheMetrics, PoolGauge
from edgellm.engine.metrics import EngineMetrics, LatencyStat, StallReason
from edgellm.engine_api import ServingMetrics
from edgellm.memory import MemoryBudget
from edgellm.metric_lines import metric_lines, milliseconds


def engine_metrics() -> EngineMetrics:
    metrics = EngineMetrics(submitted=1234, completed=3)
    metrics.stalls[StallReason.NO_CAPACITY] = 7
    for seconds in (0.002, 0.002, 0.004):
        metrics.step_duration.record(seconds)
    return metrics


def test_every_field_has_a_line_of_its_own() -> None:
    lines = str(engine_metrics()).splitlines()
    assert [line.partition(":")[0] for line in lines] == list(EngineMetrics.__slots__)
    assert "submitted: 1,234" in lines
    assert "stalls: no_capacity 7" in lines
    assert "queue_latency: none" in lines
    assert "step_duration: 3; mean 2.67 ms, p50 1.98 ms, p90 3.94 ms, p99 4 ms, max 4 ms" in lines


def test_pools_say_what_is_free() -> None:
    lines = str(ContextCacheMetrics(reused_tokens=5, base_kv_pages=PoolGauge(30, 1000))).splitlines()
    assert [line.partition(":")[0] for line in lines] == list(ContextCacheMetrics.__slots__)
    assert "reused_tokens: 5" in lines
    assert "base_kv_pages: 30 of 1,000 free" in lines


def test_groups_are_indented() -> None:
    budget = MemoryBudget(bytes_per_page=1024, num_pages=4, page_size=32, max_model_len=64)
    metrics = ServingMetrics(engine_metrics(), ContextCacheMetrics(), budget, pending=2, queued=1, resident=1)
    lines = str(metrics).splitlines()
    assert lines[:2] == ["engine:", "  submitted: 1,234"]
    assert "cache:" in lines
    assert f"memory: {budget.describe()}" in lines
    assert lines[-8:-5] == ["pending: 2", "queued: 1", "resident: 1"]
    assert lines[-5:] == ["sharing:", "  steps: 0", "  groups: 0", "  rows: 0", "  tokens_saved: 0"]
    assert max(map(len, lines)) < 200


def test_one_metric_is_one_line() -> None:
    assert str(LatencyStat()) == "none"
    assert milliseconds(1_500_000) == "1.5 s"
    assert metric_lines(EngineMetrics()).splitlines()[2] == "completed: 0"
