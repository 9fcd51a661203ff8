"""What the gateway is tested against: a model server that follows a script, and the real store with tiny adapters."""

import asyncio
import contextlib
import hashlib
import json
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from adapter_store.blobs import Blobs
from adapter_store.catalog import Catalog
from adapter_store.servicer import AdapterStoreServicer
from adapter_store.store import AdapterStore
from observability.interceptors import ServerTelemetryInterceptor
from protos import adapter_store_pb2 as store_pb
from protos import adapter_store_pb2_grpc, gateway_pb2, model_server_pb2, model_server_pb2_grpc
from protos import common_pb2 as pb
from protos.serving import Serving, channel


async def until(condition, timeout_s=3.0):
    """Wait for `condition()`; what it is worth is measured on a busy machine, so the limit is generous."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it never came to that"
        await asyncio.sleep(0.005)


def ask(adapter_id=None, *, text="hello", priority=0, revision=None, alias=None, **sampling):
    """A request; without `adapter_id` for the base model."""
    if adapter_id is None:
        target = pb.Target(base=pb.Target.Base())
    else:
        target = pb.Target(adapter=pb.Target.Adapter(adapter_id=adapter_id, revision=revision, alias=alias))
    return gateway_pb2.GenerateRequest(
        target=target, prompt=pb.Prompt(text=text), sampling=pb.SamplingParams(**sampling), priority=priority
    )


def event(**kind):
    return pb.GenerateEvent(**kind)


def accepted(request):
    answer = pb.Accepted(request_id=request.request_id, base_model="tiny", prompt_tokens=3, replica="itself")
    if request.HasField("adapter"):
        answer.adapter.CopyFrom(request.adapter)
    return event(accepted=answer)


def delta(index, text="x", choice=0):
    return event(delta=pb.Delta(index=index, token_ids=[index], text=text, choice=choice))


def finished(tokens):
    usage = pb.Usage(prompt_tokens=3, output_tokens=tokens)
    return event(finished=pb.Finished(reason=pb.FINISH_REASON_LENGTH, usage=usage, timings=pb.Timings(prefill_s=0.5)))


def answers(tokens=4, delay_s=0.0):
    async def script(request, context):
        yield accepted(request)
        for index in range(tokens):
            if delay_s:
                await asyncio.sleep(delay_s)
            yield delta(index)
        yield finished(tokens)

    return script


def refuses(error):
    async def script(request, context):
        raise error
        yield

    return script


class ScriptedServer(model_server_pb2_grpc.ModelServerServicer):
    """A ModelServer whose answers come from `script`; keeps what it was asked and how each call ended."""

    def __init__(self, script=None):
        self.script = script or answers()
        self.requests = []
        self.metadata = []
        self.remaining_s = []
        self.ended = []
        self.running = 0
        self.most_running = 0
        self.status = model_server_pb2.ReplicaStatus(base_model="tiny", context_length=512)
        self._changed = asyncio.Condition()
        self.serving = None
        self.port = 0

    async def start(self):
        self.serving = Serving([ServerTelemetryInterceptor()])
        model_server_pb2_grpc.add_ModelServerServicer_to_server(self, self.serving.server)
        await self.serving.start(f"127.0.0.1:{self.port}", ["loramux.v1.ModelServer"])
        self.port = self.serving.port
        await self.serving.set_ready(True)
        return self

    async def kill(self):
        """As when the process dies: every connection breaks."""
        await self.serving.server.stop(None)

    @property
    def address(self):
        return f"127.0.0.1:{self.port}"

    async def set_status(self, **fields):
        async with self._changed:
            for name, value in fields.items():
                if name == "resident_adapters":
                    self.status.ClearField(name)
                    self.status.resident_adapters.extend(value)
                else:
                    setattr(self.status, name, value)
            self._changed.notify_all()

    async def Generate(self, request, context):  # noqa: N802
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        self.remaining_s.append(context.time_remaining())
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        ended = "cancelled"
        try:
            async with contextlib.aclosing(self.script(request, context)) as events:
                async for item in events:
                    yield item
            ended = "done"
        except Exception:
            ended = "failed"
            raise
        finally:
            self.running -= 1
            self.ended.append(ended)

    async def WatchStatus(self, request, context):  # noqa: N802
        while True:
            yield self.status
            async with self._changed:
                await self._changed.wait()


class Store:
    """The adapter store's real service over a folder."""

    def __init__(self, folder: Path):
        self._store = AdapterStore(
            Catalog(f"sqlite:///{folder / 'catalog.db'}", 2_000_000), Blobs(folder), max_adapter_bytes=1_000_000
        )
        self.servicer = AdapterStoreServicer(self._store, 64)
        self.port = 0

    async def start(self):
        self.serving = Serving()
        adapter_store_pb2_grpc.add_AdapterStoreServicer_to_server(self.servicer, self.serving.server)
        await self.serving.start(f"127.0.0.1:{self.port}", ["loramux.v1.AdapterStore"])
        await self.serving.set_ready(True)
        self.port = self.serving.port
        return self

    @property
    def address(self):
        return f"127.0.0.1:{self.port}"

    async def stop(self):
        await self.serving.server.stop(None)

    def close(self):
        self._store.close()

    async def put(self, adapter_id, seed=0, alias=""):
        """Publish a small adapter; the revision."""
        key = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
        draw = np.random.default_rng(seed)
        files = {
            "adapter_config.json": json.dumps(
                {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
            ).encode(),
            "adapter_model.safetensors": save(
                {
                    key.format("A"): draw.standard_normal((2, 8), dtype=np.float32),
                    key.format("B"): draw.standard_normal((8, 2), dtype=np.float32),
                }
            ),
        }
        entries = [
            store_pb.FileEntry(name=name, size=len(data), sha256=hashlib.sha256(data).hexdigest())
            for name, data in files.items()
        ]
        header = store_pb.PutHeader(adapter_id=adapter_id, files=entries, alias=alias)

        async def parts():
            yield store_pb.PutRequest(header=header)
            for data in files.values():
                yield store_pb.PutRequest(chunk=data)

        async with channel(self.address) as connection:
            response = await adapter_store_pb2_grpc.AdapterStoreStub(connection).Put(parts())
        return response.revision.ref.revision

    async def call(self, name, request):
        async with channel(self.address) as connection:
            return await getattr(adapter_store_pb2_grpc.AdapterStoreStub(connection), name)(request)
