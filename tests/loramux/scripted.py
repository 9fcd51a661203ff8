"""A real gRPC server in front of services whose answers a test writes down."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from observability.interceptors import ServerTelemetryInterceptor
from protos import adapter_store_pb2, adapter_store_pb2_grpc, common_pb2, gateway_pb2, gateway_pb2_grpc, serving

REVISION = "sha256:" + "ab" * 32
Script = Callable[[gateway_pb2.GenerateRequest], AsyncIterator[common_pb2.GenerateEvent]]


def accepted(adapter_id: str = "") -> common_pb2.GenerateEvent:
    ref = common_pb2.AdapterRef(adapter_id=adapter_id, revision=REVISION) if adapter_id else None
    return common_pb2.GenerateEvent(
        accepted=common_pb2.Accepted(request_id="r1", adapter=ref, base_model="tiny", prompt_tokens=3, replica="here")
    )


def delta(index: int, text: str) -> common_pb2.GenerateEvent:
    return common_pb2.GenerateEvent(delta=common_pb2.Delta(index=index, token_ids=[100 + index], text=text))


def finished(output_tokens: int) -> common_pb2.GenerateEvent:
    usage = common_pb2.Usage(prompt_tokens=3, output_tokens=output_tokens)
    return common_pb2.GenerateEvent(finished=common_pb2.Finished(reason=common_pb2.FINISH_REASON_LENGTH, usage=usage))


async def hello(request: gateway_pb2.GenerateRequest) -> AsyncIterator[common_pb2.GenerateEvent]:
    yield accepted(request.target.adapter.adapter_id)
    for index, text in enumerate(("Hel", "lo", " 🌶️")):
        yield delta(index, text)
    yield finished(3)


async def endless(request: gateway_pb2.GenerateRequest) -> AsyncIterator[common_pb2.GenerateEvent]:
    yield accepted()
    index = 0
    while True:
        yield delta(index, "x")
        index += 1
        await asyncio.sleep(0.01)


class Generation(gateway_pb2_grpc.GenerationServicer):
    """Plays `script`; keeps the last request with its metadata, and says when a stream was cut off."""

    def __init__(self) -> None:
        self.script: Script = hello
        self.request = gateway_pb2.GenerateRequest()
        self.metadata: dict[str, Any] = {}
        self.cut_off = threading.Event()

    async def Generate(self, request: gateway_pb2.GenerateRequest, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        self.request = request
        self.metadata = dict(context.invocation_metadata())
        try:
            async for event in self.script(request):
                yield event
        except (asyncio.CancelledError, GeneratorExit):
            self.cut_off.set()
            raise

    async def ListModels(self, request: Any, context: Any) -> gateway_pb2.ListModelsResponse:  # noqa: N802
        return gateway_pb2.ListModelsResponse(
            base_model="tiny",
            context_length=128,
            adapters=[
                gateway_pb2.ListModelsResponse.Adapter(
                    adapter_id="sentiment", newest_revision=REVISION, aliases={"prod": REVISION}, revisions=1
                )
            ],
            replicas=[gateway_pb2.ListModelsResponse.Replica(address="here:1", ready=True, base_model="tiny")],
        )


class AdapterStore(adapter_store_pb2_grpc.AdapterStoreServicer):
    """Keeps what was put; answers the rest with what it was asked for."""

    def __init__(self) -> None:
        self.header = adapter_store_pb2.PutHeader()
        self.content = b""
        self.refusal: Exception | None = None
        self.calls: list[Any] = []

    async def Put(self, requests: AsyncIterator[Any], context: Any) -> adapter_store_pb2.PutResponse:  # noqa: N802
        self.content = b""
        async for request in requests:
            if self.refusal is not None:
                raise self.refusal
            if request.WhichOneof("part") == "header":
                self.header = request.header
            else:
                assert len(request.chunk) <= serving.CHUNK_BYTES
                self.content += request.chunk
        return adapter_store_pb2.PutResponse(revision=self._revision(), created=True)

    async def List(self, request: Any, context: Any) -> adapter_store_pb2.ListResponse:  # noqa: N802
        self.calls.append(request)
        alias = adapter_store_pb2.Alias(adapter_id="sentiment", alias="prod", revision=REVISION)
        return adapter_store_pb2.ListResponse(revisions=[self._revision()], aliases=[alias])

    async def SetAlias(self, request: Any, context: Any) -> adapter_store_pb2.SetAliasResponse:  # noqa: N802
        self.calls.append(request)
        return adapter_store_pb2.SetAliasResponse(previous_revision="")

    async def Delete(self, request: Any, context: Any) -> adapter_store_pb2.DeleteResponse:  # noqa: N802
        self.calls.append(request)
        return adapter_store_pb2.DeleteResponse(deleted_revisions=1)

    def _revision(self) -> adapter_store_pb2.AdapterRevision:
        return adapter_store_pb2.AdapterRevision(
            ref=common_pb2.AdapterRef(adapter_id=self.header.adapter_id or "sentiment", revision=REVISION),
            files=self.header.files,
            max_rank=8,
            target_modules=["q_proj"],
            base_model="tiny",
        )


class ScriptedServer:
    """Both services behind one port, in a thread with its own event loop."""

    def __init__(self) -> None:
        self.generation = Generation()
        self.store = AdapterStore()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._serving = self._run(self._start())
        self.address = f"127.0.0.1:{self._serving.port}"

    def close_calls(self) -> None:
        """Stop serving, and wait for every handler to have ended."""
        self._run(self._serving.server.stop(5))

    def close(self) -> None:
        self._run(self._serving.server.stop(0))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self) -> serving.Serving:
        server = serving.Serving([ServerTelemetryInterceptor()])
        gateway_pb2_grpc.add_GenerationServicer_to_server(self.generation, server.server)
        adapter_store_pb2_grpc.add_AdapterStoreServicer_to_server(self.store, server.server)
        await server.start("127.0.0.1:0", ["loramux.v1.Generation", "loramux.v1.AdapterStore"])
        await server.set_ready(True)
        return server

    def _run(self, work: Awaitable[Any]) -> Any:
        async def awaited() -> Any:
            return await work

        return asyncio.run_coroutine_threadsafe(awaited(), self._loop).result(timeout=10)
