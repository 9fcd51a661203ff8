"""The engine's statistics as metrics: totals become increments, levels stand as they are."""

from __future__ import annotations

from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from observability.metrics import EngineMetrics


def test_totals_and_levels(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    monkeypatch.setattr(metrics, "get_meter", provider.get_meter)
    instruments = EngineMetrics()
    levels = dict.fromkeys(("running", "waiting", "parked", "free_pages", "free_rank_rows", "resident_adapters"), 0)
    totals = {"prefix_queried_tokens": 10, "prefix_hit_tokens": 4, "num_preemptions": 0, "step": 1}
    instruments.observe(totals, levels | {"running": 3})
    instruments.observe(totals | {"prefix_hit_tokens": 9, "step": 5}, levels | {"running": 1})
    data = reader.get_metrics_data()
    assert data is not None
    found = {
        metric.name: metric.data.data_points[0].value
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    assert found["loramux.engine.prefix.queried"] == 10
    assert found["loramux.engine.prefix.hits"] == 9
    assert found["loramux.engine.steps"] == 5
    assert found["loramux.engine.requests.running"] == 1
