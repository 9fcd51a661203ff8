"""Spans, logs and metrics as they leave the process."""

import json
import logging
import subprocess
import sys
from concurrent import futures

import grpc
import pytest
import structlog
from opentelemetry import trace
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from observability import logs, spans
from observability.telemetry import setup


@pytest.fixture
def exporter():
    exporter = InMemorySpanExporter()
    telemetry = setup("test", span_exporter=exporter)
    yield exporter
    telemetry.shutdown()


def test_context_travels_as_metadata(exporter):
    root = spans.start("root", SpanKind.CLIENT)
    metadata = spans.inject([("x-request-id", "r"), ("traceparent", "stale")], trace.set_span_in_context(root))
    assert [key for key, _ in metadata] == ["x-request-id", "traceparent"]
    child = spans.start("child", SpanKind.SERVER, spans.extract(metadata))
    spans.end(child)
    spans.end(root, "CANCELLED")
    first, second = exporter.get_finished_spans()
    assert first.parent.span_id == second.context.span_id and first.parent.is_remote
    assert second.attributes[spans.ERROR_TYPE] == "CANCELLED" and second.status.status_code is StatusCode.ERROR


@pytest.mark.parametrize("metadata", [None, [], [("traceparent", "00-nonsense")], [("traceparent", b"\xff")]])
def test_without_a_valid_parent_a_new_trace_begins(exporter, metadata):
    outer = spans.start("unrelated")
    with trace.use_span(outer):
        spans.end(spans.start("root", parent=spans.extract(metadata)))
    assert exporter.get_finished_spans()[0].parent is None


def test_spans_after_the_fact(exporter):
    root = spans.start("root")
    inner = spans.record("prefill", root.get_span_context(), 1_000, 2_000, {"k": 1})
    spans.record("detail", inner, 1_500, 1_400, error="FAILED")
    prefill, detail = exporter.get_finished_spans()
    assert (prefill.start_time, prefill.end_time, prefill.attributes["k"]) == (1_000, 2_000, 1)
    assert prefill.parent.span_id == root.get_span_context().span_id
    assert detail.parent.span_id == inner.span_id
    assert detail.end_time == detail.start_time, (
        "clocks of two processes may disagree; a span never ends before it began"
    )


def test_a_later_setup_adds_its_exporter_and_takes_only_that_away(exporter, caplog):
    second = InMemorySpanExporter()
    telemetry = setup("second", span_exporter=second)
    spans.end(spans.start("both"))
    telemetry.shutdown()
    spans.end(spans.start("one"))
    assert [span.name for span in exporter.get_finished_spans()] == ["both", "one"]
    assert [span.name for span in second.get_finished_spans()] == ["both"]
    assert caplog.records == []


def test_logs_are_json_lines_with_their_context(exporter, capsys):
    root = spans.start("root")
    logs.configure("test")
    with trace.use_span(root):
        logs.bind_request("r-1")
        logs.get("one").info("happened", answer=42)
        logging.getLogger("two").warning("old %s", "style", extra={"port": 1})
        try:
            raise ValueError("boom")
        except ValueError:
            logs.get("three").exception("failed")
        logs.get("four").debug("not at this level")
    structlog.contextvars.clear_contextvars()
    captured = capsys.readouterr()
    assert captured.out == ""
    first, second, third = (json.loads(line) for line in captured.err.splitlines())
    assert (first["event"], first["answer"], first["level"], first["logger"]) == ("happened", 42, "info", "one")
    assert (second["event"], second["port"], second["level"]) == ("old style", 1, "warning")
    assert "ValueError: boom" in third["exception"]
    context = root.get_span_context()
    for line in (first, second, third):
        assert line["trace_id"] == trace.format_trace_id(context.trace_id)
        assert line["span_id"] == trace.format_span_id(context.span_id)
        assert (line["request_id"], line["service"]) == ("r-1", "test")
        assert line["timestamp"].endswith("Z")


def test_an_unknown_log_level_is_refused():
    with pytest.raises(ValueError, match="NOISY"):
        logs.configure("test", "NOISY")


class Collector(trace_service_pb2_grpc.TraceServiceServicer, metrics_service_pb2_grpc.MetricsServiceServicer):
    """An OTLP collector that keeps what it gets."""

    def __init__(self):
        self.spans, self.metrics, self.services = [], [], set()

    def Export(self, request, context):  # noqa: N802
        if isinstance(request, trace_service_pb2.ExportTraceServiceRequest):
            for resource in request.resource_spans:
                self.services |= {a.value.string_value for a in resource.resource.attributes if a.key == "service.name"}
                self.spans += [span.name for scope in resource.scope_spans for span in scope.spans]
            return trace_service_pb2.ExportTraceServiceResponse()
        for resource in request.resource_metrics:
            self.metrics += [metric for scope in resource.scope_metrics for metric in scope.metrics]
        return metrics_service_pb2.ExportMetricsServiceResponse()


def test_otlp_reaches_a_collector_before_shutdown_returns():
    """In a process of its own: providers are set once per process."""
    collector = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    program = f"""
from observability import metrics, spans, telemetry
running = telemetry.setup("svc", otlp_endpoint="http://127.0.0.1:{port}")
spans.end(spans.start("work"))
metrics.RequestMetrics().finished({{"k": "v"}}, 2.0, 0.5, input_tokens=3, output_tokens=8, longest_output=4)
running.shutdown()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    server.stop(None)
    assert (done.returncode, done.stderr) == (0, "")
    assert collector.spans == ["work"] and collector.services == {"svc"}
    by_name = {metric.name: metric for metric in collector.metrics}
    duration = by_name["gen_ai.server.request.duration"].histogram.data_points[0]
    assert (duration.sum, len(duration.explicit_bounds)) == (2.0, 14)
    assert duration.explicit_bounds[0] == 0.01 and duration.explicit_bounds[-1] == 81.92
    assert by_name["gen_ai.server.time_to_first_token"].histogram.data_points[0].sum == 0.5
    assert by_name["gen_ai.server.time_per_output_token"].histogram.data_points[0].sum == 0.5
    assert by_name["loramux.tokens.output"].sum.data_points[0].as_int == 8


def test_a_reader_can_be_passed():
    program = """
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from observability import metrics, telemetry
reader = InMemoryMetricReader()
telemetry.setup("svc", metric_reader=reader)
gateway = metrics.GatewayMetrics()
gateway.outstanding(1, "a:1"); gateway.outstanding(1, "a:1"); gateway.outstanding(-1, "a:1")
[metric] = reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics
assert (metric.name, metric.data.data_points[0].value) == ("loramux.gateway.requests.outstanding", 1)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
