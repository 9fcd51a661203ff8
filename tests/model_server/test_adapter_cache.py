"""The adapter cache against a store that speaks the contract: one fetch for all who ask, verified, repaired, bounded."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from model_server.adapter_cache import AdapterCache
from model_server.request import AdapterRef
from protos import adapter_format, adapter_store_pb2, common_pb2, errors, serving
from protos.adapter_store_pb2_grpc import AdapterStoreServicer, AdapterStoreStub, add_AdapterStoreServicer_to_server

SIZE = 1000


class Store(AdapterStoreServicer):
    """Holds adapters of two files; can send wrong bytes, or half of them."""

    def __init__(self) -> None:
        self.contents: dict[str, dict[str, bytes]] = {}
        self.num_fetches = 0
        self.fault = ""
        self.gate = asyncio.Event()
        self.gate.set()

    def add(self, name: str) -> AdapterRef:
        files = {adapter_format.CONFIG_FILE: b"{}" + name.encode(), adapter_format.TENSORS_FILE: name.encode() * SIZE}
        digests = [(file, hashlib.sha256(data).hexdigest()) for file, data in files.items()]
        ref = AdapterRef(name, adapter_format.revision_digest(digests))
        self.contents[ref.revision] = files
        return ref

    async def Fetch(self, request: Any, context: Any) -> AsyncIterator[adapter_store_pb2.FetchResponse]:  # noqa: N802
        self.num_fetches += 1
        await self.gate.wait()
        files = self.contents.get(request.ref.revision)
        if files is None:
            await errors.abort(context, errors.not_found("revision", request.ref.revision, "no such revision"))
        revision = adapter_store_pb2.AdapterRevision(
            ref=common_pb2.AdapterRef(adapter_id=request.ref.adapter_id, revision=request.ref.revision),
            files=[
                adapter_store_pb2.FileEntry(name=name, size=len(data), sha256=hashlib.sha256(data).hexdigest())
                for name, data in files.items()
            ],
        )
        yield adapter_store_pb2.FetchResponse(header=adapter_store_pb2.FetchHeader(revision=revision))
        for index, data in enumerate(files.values()):
            if self.fault == "cut" and index == 1:
                yield adapter_store_pb2.FetchResponse(chunk=data[: len(data) // 2])
                return
            yield adapter_store_pb2.FetchResponse(chunk=b"x" * len(data) if self.fault == "bytes" else data)


@pytest.fixture
async def store() -> AsyncIterator[tuple[Store, AdapterStoreStub]]:
    server, servicer = grpc.aio.server(), Store()
    add_AdapterStoreServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = serving.channel(f"127.0.0.1:{port}")
    yield servicer, AdapterStoreStub(channel)
    await channel.close()
    await server.stop(None)


@contextlib.contextmanager
def locked(directory: Path, ref: AdapterRef) -> Iterator[None]:
    """As by another server that is fetching it."""
    file = os.open(directory / "adapters" / f"{ref.revision.replace(':', '-')}.lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(file)


def whole(path: Path, name: str) -> bool:
    return (path / adapter_format.TENSORS_FILE).read_bytes() == name.encode() * SIZE


async def test_one_fetch_for_all_who_ask_in_two_servers(store: tuple[Store, AdapterStoreStub], tmp_path: Path) -> None:
    """FLT-09, and one fetch per revision per node: two caches on one directory."""
    servicer, stub = store
    ref = servicer.add("a")
    caches = [AdapterCache(tmp_path, 10**6, stub) for _ in range(2)]
    servicer.gate.clear()
    asked = [asyncio.create_task(cache.ensure(ref)) for cache in caches for _ in range(5)]
    await asyncio.sleep(0.2)
    AdapterCache(tmp_path, 10**6, stub)  # a third server starts: what is under way is not swept up
    servicer.gate.set()
    paths = await asyncio.gather(*asked)
    assert len(set(paths)) == 1 and whole(paths[0], "a")
    assert servicer.num_fetches == 1


@pytest.mark.parametrize("fault", ["bytes", "cut"])
async def test_wrong_bytes_are_never_kept(store: tuple[Store, AdapterStoreStub], tmp_path: Path, fault: str) -> None:
    """FIL-11."""
    servicer, stub = store
    ref = servicer.add("a")
    cache = AdapterCache(tmp_path, 10**6, stub)
    servicer.fault = fault
    with pytest.raises(errors.ServiceError) as caught:
        await cache.ensure(ref)
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE
    assert not list((tmp_path / "adapters").glob("sha256-*[0-9a-f]"))
    assert not list((tmp_path / "adapters").glob("fetching-*"))
    servicer.fault = ""
    assert whole(await cache.ensure(ref), "a")


async def test_damaged_files_are_fetched_again(store: tuple[Store, AdapterStoreStub], tmp_path: Path) -> None:
    servicer, stub = store
    ref = servicer.add("a")
    cache = AdapterCache(tmp_path, 10**6, stub)
    path = await cache.ensure(ref)
    (path / adapter_format.TENSORS_FILE).write_bytes(b"short")
    cache.release(ref, readable=False)
    assert whole(await cache.ensure(ref), "a")
    assert servicer.num_fetches == 2


@pytest.mark.parametrize("fault", ["read-only", "gone", "no descriptors"])
async def test_what_cannot_be_discarded_is_no_failure_of_release(
    store: tuple[Store, AdapterStoreStub], tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller is in the middle of the engine's messages."""
    servicer, stub = store
    ref = servicer.add("a")
    cache = AdapterCache(tmp_path, 10**6, stub)
    await cache.ensure(ref)

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS if fault == "read-only" else errno.EMFILE, "refused")

    with monkeypatch.context() as patch:
        if fault == "gone":
            shutil.rmtree(tmp_path)
        else:
            patch.setattr(*((Path, "rename") if fault == "read-only" else (os, "open")), refuse)
        cache.release(ref, readable=False)
    assert whole(await cache.ensure(ref), "a")
    assert servicer.num_fetches == (2 if fault == "gone" else 1)


async def test_damaged_files_go_whatever_an_earlier_deletion_left(
    store: tuple[Store, AdapterStoreStub], tmp_path: Path
) -> None:
    servicer, stub = store
    ref = servicer.add("a")
    cache = AdapterCache(tmp_path, 10**6, stub)
    path = await cache.ensure(ref)
    left = path.with_name(f"evicting-{path.name}.{os.getpid()}")
    left.mkdir()
    (left / "file").touch()
    cache.release(ref, readable=False)
    assert not path.exists()


async def test_a_folder_that_was_removed_is_made_again(store: tuple[Store, AdapterStoreStub], tmp_path: Path) -> None:
    servicer, stub = store
    cache = AdapterCache(tmp_path / "cache", 10**6, stub)
    for name in "ab":
        shutil.rmtree(tmp_path / "cache")
        assert whole(await cache.ensure(servicer.add(name)), name)


async def test_waiting_for_another_server_takes_no_thread(
    store: tuple[Store, AdapterStoreStub], tmp_path: Path
) -> None:
    """Threads are few: with all of them waiting nobody's fetch, here or in a server that waits for us, would go on."""
    servicer, stub = store
    theirs, ours = servicer.add("a"), servicer.add("b")
    cache = AdapterCache(tmp_path, 10**6, stub)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    with locked(tmp_path, theirs):
        waiting = asyncio.create_task(cache.ensure(theirs))
        await asyncio.sleep(0.05)
        assert whole(await asyncio.wait_for(cache.ensure(ours), 10), "b")
        assert not waiting.done()
    assert whole(await asyncio.wait_for(waiting, 10), "a")


async def test_who_is_cancelled_while_waiting_holds_no_lock(
    store: tuple[Store, AdapterStoreStub], tmp_path: Path
) -> None:
    servicer, stub = store
    ref = servicer.add("a")
    cache = AdapterCache(tmp_path, 10**6, stub)
    await cache.ensure(ref)
    cache.release(ref)
    with locked(tmp_path, ref):  # as by another server that deletes it
        waiting = asyncio.create_task(cache.ensure(ref))
        await asyncio.sleep(0.05)
        waiting.cancel()
        await asyncio.wait([waiting])
    await asyncio.sleep(0.2)
    with locked(tmp_path, ref):
        pass


async def test_the_disk_is_bounded_and_what_is_in_use_stays(
    store: tuple[Store, AdapterStoreStub], tmp_path: Path
) -> None:
    servicer, stub = store
    refs = [servicer.add(name) for name in "abcd"]
    cache = AdapterCache(tmp_path, 3 * SIZE, stub)
    held = await cache.ensure(refs[0])
    for ref in refs[1:]:
        await cache.ensure(ref)
        cache.release(ref)
    assert whole(held, "a")
    kept = [path for path in (tmp_path / "adapters").iterdir() if path.is_dir()]
    assert len(kept) == 2 and held in kept


async def test_an_unknown_revision_says_what_the_store_says(
    store: tuple[Store, AdapterStoreStub], tmp_path: Path
) -> None:
    _, stub = store
    with pytest.raises(errors.ServiceError) as caught:
        await AdapterCache(tmp_path, 10**6, stub).ensure(AdapterRef("a", "sha256:" + "0" * 64))
    assert caught.value.code is grpc.StatusCode.NOT_FOUND


async def test_no_store_is_a_refusal(tmp_path: Path) -> None:
    with pytest.raises(errors.ServiceError) as caught:
        await AdapterCache(tmp_path, 10**6, None).ensure(AdapterRef("a", "sha256:" + "0" * 64))
    assert caught.value.code is grpc.StatusCode.FAILED_PRECONDITION


async def test_finding_fetches_nothing(tmp_path: Path, store: tuple[Store, AdapterStoreStub]) -> None:
    servicer, stub = store
    cache, ref = AdapterCache(tmp_path, 10**6, stub), servicer.add("a")
    assert await cache.find(ref) is None and servicer.num_fetches == 0
    await cache.ensure(ref)
    path = await cache.find(ref)
    assert path is not None and whole(path, "a")
    cache.release(ref)
    cache.release(ref)
