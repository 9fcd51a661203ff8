"""Set-up of traces, metrics and logs; the only module that imports the OpenTelemetry SDK."""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry import metrics, trace
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased

from observability import logs


class _Removable(SpanProcessor):
    """Passes spans on until shut down: a provider keeps its processors for life."""

    def __init__(self, processor: SpanProcessor) -> None:
        self._processor: SpanProcessor | None = processor

    def on_end(self, span: ReadableSpan) -> None:
        if self._processor is not None:
            self._processor.on_end(span)

    def shutdown(self) -> None:
        if self._processor is not None:
            processor, self._processor = self._processor, None
            processor.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._processor is None or self._processor.force_flush(timeout_millis)


class Telemetry:
    """What one `setup` added; `shutdown` flushes and ends exactly that."""

    def __init__(self, processors: Sequence[SpanProcessor], meter_provider: MeterProvider | None) -> None:
        self._processors = processors
        self._meter_provider = meter_provider

    def shutdown(self) -> None:
        for processor in self._processors:
            processor.shutdown()
        if self._meter_provider is not None:
            self._meter_provider.shutdown()


def setup(
    service_name: str,
    *,
    otlp_endpoint: str | None = None,
    log_level: str = "INFO",
    span_exporter: SpanExporter | None = None,
    metric_reader: MetricReader | None = None,
) -> Telemetry:
    """Configure this process: JSON logs, and traces and metrics by OTLP over gRPC when `otlp_endpoint` is given.

    `span_exporter` and `metric_reader` get what is recorded at once, for tests. A process has one tracer provider: a
    second call adds its exporters to it and leaves the service name. Raises ValueError for an unknown `log_level`.
    """
    logs.configure(service_name, log_level)
    resource = Resource.create({SERVICE_NAME: service_name})
    plain = otlp_endpoint is not None and not otlp_endpoint.startswith("https://")

    processors: list[SpanProcessor] = []
    if span_exporter is not None:
        processors.append(_Removable(SimpleSpanProcessor(span_exporter)))
    if otlp_endpoint:
        exporter = OTLPSpanExporter(endpoint=otlp_endpoint, insecure=plain)
        processors.append(_Removable(BatchSpanProcessor(exporter)))
    if processors:
        provider = trace.get_tracer_provider()
        if not isinstance(provider, TracerProvider):
            provider = TracerProvider(sampler=ParentBased(ALWAYS_ON), resource=resource, shutdown_on_exit=False)
            trace.set_tracer_provider(provider)
        for processor in processors:
            provider.add_span_processor(processor)

    readers: list[MetricReader] = []
    if metric_reader is not None:
        readers.append(metric_reader)
    if otlp_endpoint:
        readers.append(PeriodicExportingMetricReader(OTLPMetricExporter(endpoint=otlp_endpoint, insecure=plain)))
    meter_provider = None
    if readers:
        meter_provider = MeterProvider(readers, resource=resource, shutdown_on_exit=False)
        metrics.set_meter_provider(meter_provider)
    return Telemetry(processors, meter_provider)
