"""PinAdapter and UnpinAdapter on the real stack: resident without a request, refused with the errors a request would get."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from loramux.aio import AsyncClient
from loramux.launcher import Stack
from protos import common_pb2, model_server_pb2, serving
from protos.errors import ServiceError, from_rpc_error
from protos.model_server_pb2_grpc import ModelServerStub
from tests.e2e import adapter_files
from tests.e2e.adapter_files import HIDDEN, Q_PROJ, publish
from tests.e2e.status_watch import StatusWatch


class Operator:
    def __init__(self, address: str) -> None:
        self.channel = serving.channel(address)
        self._stub: Any = ModelServerStub(self.channel)

    async def pin(self, adapter_id: str, revision: str) -> None:
        ref = common_pb2.AdapterRef(adapter_id=adapter_id, revision=revision)
        await self._call(self._stub.PinAdapter(model_server_pb2.PinAdapterRequest(adapter=ref)))

    async def unpin(self, adapter_id: str, revision: str) -> None:
        ref = common_pb2.AdapterRef(adapter_id=adapter_id, revision=revision)
        await self._call(self._stub.UnpinAdapter(model_server_pb2.UnpinAdapterRequest(adapter=ref)))

    async def _call(self, call: Any) -> None:
        try:
            await call
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error


@pytest.fixture
async def operator(stack: Stack) -> AsyncIterator[Operator]:
    operator = Operator(stack.model_servers[0])
    yield operator
    await operator.channel.close()


@pytest.fixture
async def watch(stack: Stack) -> AsyncIterator[StatusWatch]:
    async with StatusWatch(stack.model_servers[0]) as watch:
        yield watch


async def test_pinned_it_is_resident_before_it_is_asked_for(
    client: AsyncClient, operator: Operator, watch: StatusWatch, tmp_path: Path
) -> None:
    shapes = {Q_PROJ.format(layer=0): (HIDDEN, HIDDEN)}
    revision = await publish(client, adapter_files.write(tmp_path / "kept", shapes), "kept")
    ref = common_pb2.AdapterRef(adapter_id="kept", revision=revision)
    await operator.pin("kept", revision)
    await operator.pin("kept", revision)
    status = await watch.until(lambda status: ref in status.pinned_adapters)
    assert ref in status.resident_adapters
    assert status.kv_bytes > 0 and status.adapter_bytes > 0
    async with client.generate("Hello", adapter="kept", max_tokens=2, ignore_eos=True) as stream:
        await stream.read()
        assert stream.finished is not None and stream.finished.timings.adapter_load_s == 0
    await operator.unpin("kept", revision)
    await operator.unpin("kept", revision)
    status = await watch.until(lambda status: ref not in status.pinned_adapters)
    assert ref in status.resident_adapters, "evictable, not evicted"


async def test_an_adapter_that_is_not_there(operator: Operator, watch: StatusWatch) -> None:
    with pytest.raises(ServiceError) as caught:
        await operator.pin("nobody", "sha256:" + "0" * 64)
    assert caught.value.code is grpc.StatusCode.NOT_FOUND
    assert not watch.latest.pinned_adapters


async def test_an_adapter_of_another_model(client: AsyncClient, operator: Operator, tmp_path: Path) -> None:
    shapes = {Q_PROJ.format(layer=0): (64, 64)}
    revision = await publish(client, adapter_files.write(tmp_path / "foreign", shapes), "foreign-pin")
    with pytest.raises(ServiceError) as caught:
        await operator.pin("foreign-pin", revision)
    assert caught.value.code is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize(
    ("adapter_id", "revision", "field"),
    [
        ("", "sha256:" + "0" * 64, "adapter.adapter_id"),
        ("../a", "sha256:" + "0" * 64, "adapter.adapter_id"),
        ("a", "newest", "adapter.revision"),
        ("a", "", "adapter.revision"),
    ],
)
async def test_a_reference_that_names_no_revision(
    operator: Operator, adapter_id: str, revision: str, field: str
) -> None:
    for call in (operator.pin, operator.unpin):
        with pytest.raises(ServiceError) as caught:
            await call(adapter_id, revision)
        assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.field == field
