"""Every instrument of every service. `gen_ai.*` names and buckets follow the GenAI conventions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from opentelemetry import metrics

from observability import spans

_DURATION_BUCKETS: Final = tuple(0.01 * 2**n for n in range(14))
_FIRST_TOKEN_BUCKETS: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
_PER_TOKEN_BUCKETS: Final = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)


class RequestMetrics:
    """Of a service that answers generate calls, as it sees them. Durations in seconds."""

    def __init__(self) -> None:
        meter = metrics.get_meter("loramux")
        self._duration = meter.create_histogram(
            "gen_ai.server.request.duration", "s", explicit_bucket_boundaries_advisory=_DURATION_BUCKETS
        )
        self._first_token = meter.create_histogram(
            "gen_ai.server.time_to_first_token", "s", explicit_bucket_boundaries_advisory=_FIRST_TOKEN_BUCKETS
        )
        self._per_token = meter.create_histogram(
            "gen_ai.server.time_per_output_token", "s", explicit_bucket_boundaries_advisory=_PER_TOKEN_BUCKETS
        )
        self._input_tokens = meter.create_counter("loramux.tokens.input", "{token}")
        self._output_tokens = meter.create_counter("loramux.tokens.output", "{token}")

    def finished(
        self,
        attributes: spans.Attributes,
        duration_s: float,
        first_token_s: float | None,
        input_tokens: int = 0,
        output_tokens: int = 0,
        longest_output: int = 0,
        error: str | None = None,
    ) -> None:
        """One request ended: `first_token_s` after its start the first token was sent, or None was. `output_tokens` are
        those of all choices, which come side by side: the longest of them, `longest_output` tokens, took the time."""
        ended = {**attributes, spans.ERROR_TYPE: error} if error else attributes
        self._duration.record(duration_s, ended)
        if first_token_s is not None:
            self._first_token.record(first_token_s, attributes)
            if longest_output > 1:
                self._per_token.record((duration_s - first_token_s) / (longest_output - 1), attributes)
        self._input_tokens.add(input_tokens, attributes)
        self._output_tokens.add(output_tokens, attributes)


class GatewayMetrics:
    """Of the gateway's queue and router."""

    def __init__(self) -> None:
        meter = metrics.get_meter("loramux")
        self._queue_time = meter.create_histogram(
            "loramux.gateway.queue.duration", "s", explicit_bucket_boundaries_advisory=_FIRST_TOKEN_BUCKETS
        )
        self._waiting = meter.create_up_down_counter("loramux.gateway.requests.waiting", "{request}")
        self._outstanding = meter.create_up_down_counter("loramux.gateway.requests.outstanding", "{request}")
        self._retries = meter.create_counter("loramux.gateway.retries", "{request}")

    def waiting(self, change: int, priority: str) -> None:
        self._waiting.add(change, {spans.PRIORITY: priority})

    def left_queue(self, waited_s: float, priority: str) -> None:
        self._queue_time.record(waited_s, {spans.PRIORITY: priority})

    def outstanding(self, change: int, replica: str) -> None:
        self._outstanding.add(change, {spans.REPLICA: replica})

    def retried(self, replica: str) -> None:
        """A request that `replica` failed before its first event goes to another."""
        self._retries.add(1, {spans.REPLICA: replica})


class EngineMetrics:
    """Of a model server's engine, from the running totals and levels it reports."""

    def __init__(self) -> None:
        meter = metrics.get_meter("loramux")
        self._totals = {
            "prefix_queried_tokens": meter.create_counter("loramux.engine.prefix.queried", "{token}"),
            "prefix_hit_tokens": meter.create_counter("loramux.engine.prefix.hits", "{token}"),
            "num_preemptions": meter.create_counter("loramux.engine.preemptions", "{request}"),
            "step": meter.create_counter("loramux.engine.steps", "{step}"),
        }
        self._levels = {
            "running": meter.create_gauge("loramux.engine.requests.running", "{request}"),
            "waiting": meter.create_gauge("loramux.engine.requests.waiting", "{request}"),
            "parked": meter.create_gauge("loramux.engine.requests.parked", "{request}"),
            "free_pages": meter.create_gauge("loramux.engine.pages.free", "{page}"),
            "free_rank_rows": meter.create_gauge("loramux.engine.rank_rows.free", "{row}"),
            "resident_adapters": meter.create_gauge("loramux.engine.adapters.resident", "{adapter}"),
        }
        self._seen = dict.fromkeys(self._totals, 0)

    def observe(self, totals: Mapping[str, int], levels: Mapping[str, int]) -> None:
        """`totals` since the engine started and `levels` now, by the names above."""
        for name, counter in self._totals.items():
            counter.add(totals[name] - self._seen[name])
            self._seen[name] = totals[name]
        for name, gauge in self._levels.items():
            gauge.set(levels[name])
