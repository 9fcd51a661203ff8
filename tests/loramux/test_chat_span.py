"""Each generation is one trace from the caller's span down, however it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from loramux import AsyncClient, Client
from observability import telemetry
from tests.loramux import scripted
from tests.loramux.scripted import ScriptedServer


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    configured = telemetry.setup("test", span_exporter=exporter)
    yield exporter
    configured.shutdown()


def chain(exporter: InMemorySpanExporter, name: str) -> tuple[ReadableSpan, ReadableSpan, ReadableSpan]:
    """The spans of one generation: caller, RPC on this side, RPC on the server's."""
    spans = exporter.get_finished_spans()
    top = next(span for span in spans if span.name == name)
    assert top.parent is None
    client = next(span for span in spans if span.parent and span.parent.span_id == top.context.span_id)
    server = next(span for span in spans if span.parent and span.parent.span_id == client.context.span_id)
    return top, client, server


def test_a_finished_stream(server: ScriptedServer, exporter: InMemorySpanExporter) -> None:
    with Client(server.address) as client:
        client.generate("Hi", adapter="sentiment", max_tokens=5, seed=2**63 + 7).read()
    server.close_calls()
    top, *_ = chain(exporter, "chat sentiment")
    attributes = top.attributes or {}
    assert attributes["gen_ai.request.model"] == "sentiment"
    assert attributes["gen_ai.response.model"] == f"sentiment@{scripted.REVISION}"
    assert attributes["gen_ai.request.max_tokens"] == 5
    assert attributes["gen_ai.request.seed"] == 7, "an attribute is signed, a seed is not"
    assert attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert attributes["gen_ai.usage.output_tokens"] == 3
    assert top.status.status_code is StatusCode.UNSET


def test_a_cancelled_stream(server: ScriptedServer, exporter: InMemorySpanExporter) -> None:
    server.generation.script = scripted.endless
    with Client(server.address) as client:
        for _ in client.generate("Hi"):
            break
        assert server.generation.cut_off.wait(5)
    server.close_calls()
    top, *_ = chain(exporter, "chat")
    assert (top.attributes or {})["error.type"] == "CANCELLED"


async def test_a_cancelled_asyncio_stream(server: ScriptedServer, exporter: InMemorySpanExporter) -> None:
    server.generation.script = scripted.endless
    async with AsyncClient(server.address) as client:
        async for _ in client.generate("Hi"):
            break
        assert await asyncio.to_thread(server.generation.cut_off.wait, 5)
        await asyncio.to_thread(server.close_calls)
    top, *_ = chain(exporter, "chat")
    assert (top.attributes or {})["error.type"] == "CANCELLED"
