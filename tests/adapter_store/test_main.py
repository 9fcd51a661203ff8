"""`python -m adapter_store` as an operator runs it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from protos import adapter_store_pb2 as pb
from protos import adapter_store_pb2_grpc, serving
from tests.adapter_store.adapters import adapter, put


@asynccontextmanager
async def process(folder: Path, **settings: str) -> AsyncIterator[asyncio.subprocess.Process]:
    environment = {f"LORAMUX_ADAPTER_STORE_{name}": value for name, value in settings.items()}
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "adapter_store",
        env={
            **os.environ,
            "LORAMUX_ADAPTER_STORE_DATA_DIR": str(folder),
            "LORAMUX_ADAPTER_STORE_LISTEN": "127.0.0.1:0",
            **environment,
        },
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


async def address_of(child: asyncio.subprocess.Process) -> str:
    assert child.stderr is not None
    async with asyncio.timeout(60):
        async for line in child.stderr:
            event = json.loads(line)
            if event["event"] == "serving":
                return str(event["address"])
    raise AssertionError("the store ended before it served")


async def test_a_killed_store_comes_back_with_everything_and_stops_cleanly(tmp_path: Path) -> None:
    async with process(tmp_path) as child, serving.channel(await address_of(child)) as channel:
        stub = adapter_store_pb2_grpc.AdapterStoreStub(channel)
        await put(stub, "a", adapter(), alias="stable")
        before = await stub.List(pb.ListRequest())
        assert len(before.revisions) == 1
        child.kill()
        await child.wait()
    async with process(tmp_path) as child, serving.channel(await address_of(child)) as channel:
        stub = adapter_store_pb2_grpc.AdapterStoreStub(channel)
        assert await stub.List(pb.ListRequest()) == before
        watch = stub.Watch(pb.WatchRequest())
        await watch.read()  # an open watch does not hold the shutdown up
        child.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(child.wait(), 8) == 0
        watch.cancel()


async def test_a_setting_that_is_wrong_is_named(tmp_path: Path) -> None:
    for settings, name in (({"LISTEN": "nowhere"}, "listen"), ({"MAX_CATALOG_BYTES": "0"}, "max_catalog_bytes")):
        async with process(tmp_path, **settings) as child:
            _, stderr = await asyncio.wait_for(child.communicate(), 60)
            assert child.returncode == 1
            assert name in stderr.decode()


async def test_two_stores_never_share_a_folder(tmp_path: Path) -> None:
    async with process(tmp_path) as first:
        await address_of(first)
        async with process(tmp_path) as second:
            _, stderr = await asyncio.wait_for(second.communicate(), 60)
            assert second.returncode == 1
            assert "another adapter store is using" in stderr.decode()
