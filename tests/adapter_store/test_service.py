"""The store through its gRPC API, served as in production but in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from adapter_store.blobs import Blobs
from adapter_store.catalog import Catalog
from adapter_store.servicer import AdapterStoreServicer
from adapter_store.store import AdapterStore
from protos import adapter_store_pb2 as pb
from protos import adapter_store_pb2_grpc, common_pb2, serving
from protos.adapter_format import CONFIG_FILE, TENSORS_FILE, revision_digest
from protos.errors import ServiceError, from_rpc_error
from tests.adapter_store.adapters import adapter, config, lora, put, safetensors, tensor

LIMIT = 3 * 1024 * 1024


@dataclass
class Running:
    stub: Any
    channel: grpc.aio.Channel
    store: AdapterStore
    serving: serving.Serving
    servicer: AdapterStoreServicer
    folder: Path

    def files(self) -> set[str]:
        """The names of all files in the store's folders."""
        return {p.name for part in ("blobs", "incoming") for p in (self.folder / part).iterdir()}


@asynccontextmanager
async def running(folder: Path, watch_queue: int = 100, max_catalog_bytes: int = 100_000) -> AsyncIterator[Running]:
    catalog = Catalog(f"sqlite:///{folder / 'catalog.db'}", max_catalog_bytes)
    store = AdapterStore(catalog, Blobs(folder), LIMIT)
    servicer = AdapterStoreServicer(store, watch_queue)
    server = serving.Serving()
    adapter_store_pb2_grpc.add_AdapterStoreServicer_to_server(servicer, server.server)
    await server.start("127.0.0.1:0", ["loramux.v1.AdapterStore"])
    await server.set_ready(True)
    async with serving.channel(f"127.0.0.1:{server.port}") as channel:
        yield Running(adapter_store_pb2_grpc.AdapterStoreStub(channel), channel, store, server, servicer, folder)
    await servicer.drain()
    await server.server.stop(1)
    store.close()


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Running]:
    async with running(tmp_path) as service:
        yield service


async def refused(call: Any) -> ServiceError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return from_rpc_error(raised.value)


async def send(service: Running, requests: Sequence[pb.PutRequest]) -> pb.PutResponse:
    async def iterate() -> AsyncIterator[pb.PutRequest]:
        for request in requests:
            yield request

    response: pb.PutResponse = await service.stub.Put(iterate())
    return response


async def fetch(service: Running, ref: common_pb2.AdapterRef) -> tuple[pb.AdapterRevision, bytes]:
    call = service.stub.Fetch(pb.FetchRequest(ref=ref))
    parts = [part async for part in call]
    assert all(len(part.chunk) <= serving.CHUNK_BYTES for part in parts)
    return parts[0].header.revision, b"".join(part.chunk for part in parts[1:])


async def eventually(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110 - what is awaited happens in the server, which tells nobody
            await asyncio.sleep(0.01)


async def next_event(watch: Any) -> pb.CatalogEvent:
    event: pb.CatalogEvent = await asyncio.wait_for(watch.read(), 10)
    return event


async def test_what_is_put_can_be_got_listed_and_fetched(service: Running) -> None:
    files = {CONFIG_FILE: config(r=64, base_model_name_or_path="llama"), TENSORS_FILE: safetensors(lora(64, 2, 2500))}
    response = await put(service.stub, "org/x.v1", files, alias="stable")
    revision = response.revision
    digests = [(name, sha256(data).hexdigest()) for name, data in files.items()]
    assert response.created
    assert revision.ref == common_pb2.AdapterRef(adapter_id="org/x.v1", revision=revision_digest(digests))
    assert [(f.name, f.size, f.sha256) for f in revision.files] == [(n, len(files[n]), d) for n, d in digests]
    assert (revision.base_model, revision.max_rank, list(revision.target_modules)) == ("llama", 64, ["q_proj"])
    assert revision.num_parameters == 2 * 64 * 5000
    for query in ({}, {"alias": "stable"}, {"revision": revision.ref.revision}):
        assert await service.stub.Get(pb.GetRequest(adapter_id="org/x.v1", **query)) == revision
    listed = await service.stub.List(pb.ListRequest())
    assert list(listed.revisions) == [revision]
    assert list(listed.aliases) == [pb.Alias(adapter_id="org/x.v1", alias="stable", revision=revision.ref.revision)]
    assert await service.stub.List(pb.ListRequest(adapter_id="org")) == pb.ListResponse()
    assert await fetch(service, revision.ref) == (revision, files[CONFIG_FILE] + files[TENSORS_FILE])


async def test_the_same_content_is_one_revision_however_often_it_is_put(service: Running) -> None:  # LIF-13
    responses = await asyncio.gather(*(put(service.stub, "a", adapter()) for _ in range(8)))
    assert sorted(r.created for r in responses) == [False] * 7 + [True]
    assert len({r.revision.SerializeToString(deterministic=True) for r in responses}) == 1
    await put(service.stub, "b", dict(reversed(adapter().items())))  # another name, files in the other order
    assert len((await service.stub.List(pb.ListRequest())).revisions) == 2
    assert service.files() == {f.sha256 for f in responses[0].revision.files}


GOOD = adapter()
ENTRIES = [pb.FileEntry(name=name, size=len(data)) for name, data in GOOD.items()]
CONFIG, TENSORS = GOOD.values()
WRONG_DIGEST = pb.FileEntry(name=TENSORS_FILE, size=len(TENSORS), sha256="0" * 64)


def head(*entries: pb.FileEntry, adapter_id: str = "a", alias: str = "") -> pb.PutRequest:
    return pb.PutRequest(header=pb.PutHeader(adapter_id=adapter_id, files=entries or ENTRIES, alias=alias))


def chunk(data: bytes) -> pb.PutRequest:
    return pb.PutRequest(chunk=data)


@pytest.mark.parametrize(
    ("requests", "field"),
    [
        ([], "header"),
        ([pb.PutRequest()], "part"),
        ([chunk(CONFIG)], "part"),
        ([head(), head()], "part"),
        ([head()], CONFIG_FILE),
        ([head(), chunk(CONFIG)], TENSORS_FILE),
        ([head(), chunk(CONFIG), chunk(TENSORS[:-1])], TENSORS_FILE),
        ([head(), chunk(CONFIG), chunk(TENSORS), chunk(b"x")], "chunk"),
        ([head(), chunk(CONFIG), chunk(TENSORS + b"x")], TENSORS_FILE),
        ([head(), chunk(CONFIG + TENSORS)], CONFIG_FILE),
        ([head(), chunk(TENSORS), chunk(CONFIG)], CONFIG_FILE),
        ([head(), chunk(bytes(serving.CHUNK_BYTES + 1))], "chunk"),
        ([head(ENTRIES[0])], TENSORS_FILE),
        ([head(ENTRIES[1])], CONFIG_FILE),
        ([head(*ENTRIES, pb.FileEntry(name="README.md", size=1))], "README.md"),
        ([head(ENTRIES[0], pb.FileEntry(name="adapter_model.bin", size=1))], "adapter_model.bin"),
        ([head(ENTRIES[0], pb.FileEntry(name=TENSORS_FILE, size=LIMIT + 1))], TENSORS_FILE),
        ([head(pb.FileEntry(name=CONFIG_FILE, size=2**20), ENTRIES[1])], CONFIG_FILE),
        ([head(adapter_id="")], "header.adapter_id"),
        ([head(adapter_id="base")], "header.adapter_id"),
        ([head(adapter_id="../x")], "header.adapter_id"),
        ([head(alias="a b")], "header.alias"),
        ([head(ENTRIES[0], WRONG_DIGEST), chunk(CONFIG), chunk(TENSORS)], TENSORS_FILE),
        ([head(pb.FileEntry(name=CONFIG_FILE, size=0), ENTRIES[1]), chunk(TENSORS)], CONFIG_FILE),
    ],
)  # fmt: skip
async def test_a_refused_upload_names_the_field_and_leaves_nothing(
    service: Running, requests: list[pb.PutRequest], field: str
) -> None:
    error = await refused(send(service, requests))
    assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)
    assert service.files() == set()
    assert await service.stub.List(pb.ListRequest()) == pb.ListResponse()
    assert (await put(service.stub, "a", GOOD)).created  # the server lives


@pytest.mark.parametrize(
    ("files", "field"),
    [
        (adapter(use_dora=True), f"{CONFIG_FILE}/use_dora"),
        (adapter(r=8), f"{TENSORS_FILE}/model.layers.0.self_attn.q_proj"),
        (GOOD | {TENSORS_FILE: safetensors({})}, TENSORS_FILE),  # FIL-07
        (
            GOOD | {TENSORS_FILE: safetensors(lora() | {"base_model.model.lm_head.weight": tensor((8, 8))})},
            f"{TENSORS_FILE}/base_model.model.lm_head.weight",  # VOC-01
        ),
        (adapter(fill=0xFF), f"{TENSORS_FILE}/base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"),
    ],
)
async def test_an_invalid_adapter_is_refused_and_leaves_nothing(
    service: Running, files: dict[str, bytes], field: str
) -> None:
    error = await refused(put(service.stub, "a", files, alias="stable"))
    assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)
    assert service.files() == set()


async def test_an_upload_cut_short_leaves_nothing(service: Running) -> None:
    started = asyncio.Event()

    async def requests() -> AsyncIterator[pb.PutRequest]:
        yield head()
        yield chunk(CONFIG)
        started.set()
        await asyncio.Event().wait()

    call = service.stub.Put(requests())
    task = asyncio.ensure_future(call)
    await started.wait()
    call.cancel()
    await asyncio.wait([task])
    await eventually(lambda: not service.files())
    assert (await put(service.stub, "a", GOOD)).created


async def test_a_full_catalog_keeps_no_file_of_what_it_refuses(tmp_path: Path) -> None:
    async with running(tmp_path, max_catalog_bytes=600) as service:
        first = (await put(service.stub, "a", adapter(1))).revision
        assert (await refused(put(service.stub, "a", adapter(2)))).code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert service.files() == {f.sha256 for f in first.files}


async def test_delete_takes_only_the_files_nothing_else_holds(service: Running) -> None:
    one, two = [(await put(service.stub, "a", adapter(fill))).revision for fill in (1, 2)]
    assert one.files[0] == two.files[0]  # the configuration is shared
    await put(service.stub, "b", adapter(2))
    deleted = await service.stub.Delete(pb.DeleteRequest(adapter_id="a", revision=one.ref.revision))
    assert deleted.deleted_revisions == 1
    assert service.files() == {f.sha256 for f in two.files}
    await service.stub.Delete(pb.DeleteRequest(adapter_id="a"))
    assert service.files() == {f.sha256 for f in two.files}
    await service.stub.Delete(pb.DeleteRequest(adapter_id="b"))
    assert service.files() == set()
    assert (await refused(service.stub.Delete(pb.DeleteRequest(adapter_id="b")))).code == grpc.StatusCode.NOT_FOUND


async def test_aliases_move_protect_and_go(service: Running) -> None:
    one, two = [(await put(service.stub, "a", adapter(fill), alias="stable")).revision.ref.revision for fill in (1, 2)]

    async def set_alias(revision: str, alias: str = "stable", adapter_id: str = "a") -> str:
        request = pb.SetAliasRequest(adapter_id=adapter_id, alias=alias, revision=revision)
        previous: str = (await service.stub.SetAlias(request)).previous_revision
        return previous

    assert await set_alias(one) == two
    error = await refused(service.stub.Delete(pb.DeleteRequest(adapter_id="a", revision=one)))
    assert error.code == grpc.StatusCode.FAILED_PRECONDITION and "stable" in error.message
    assert await set_alias("") == one
    await service.stub.Delete(pb.DeleteRequest(adapter_id="a", revision=one))
    for wrong in (set_alias(one), set_alias(""), set_alias(two, adapter_id="b")):
        assert (await refused(wrong)).code == grpc.StatusCode.NOT_FOUND
    assert (await refused(set_alias(two, alias=".."))).field == "alias"
    assert (await refused(service.stub.Get(pb.GetRequest(adapter_id="a", alias="")))).field == "alias"
    await set_alias(two)
    assert (await service.stub.Delete(pb.DeleteRequest(adapter_id="a"))).deleted_revisions == 1
    assert await service.stub.List(pb.ListRequest()) == pb.ListResponse()


async def test_fetch_names_an_exact_revision(service: Running) -> None:
    await put(service.stub, "a", GOOD)
    for ref, code in (
        (common_pb2.AdapterRef(adapter_id="a"), grpc.StatusCode.INVALID_ARGUMENT),
        (common_pb2.AdapterRef(adapter_id="a", revision="sha256:" + "0" * 64), grpc.StatusCode.NOT_FOUND),
        (common_pb2.AdapterRef(adapter_id="A", revision="sha256:" + "0" * 64), grpc.StatusCode.NOT_FOUND),
    ):
        assert (await refused(fetch(service, ref))).code == code


async def test_a_fetch_under_way_survives_the_deletion(service: Running) -> None:
    files = {CONFIG_FILE: config(r=64), TENSORS_FILE: safetensors(lora(64, 2, 2500))}
    ref = (await put(service.stub, "a", files)).revision.ref
    call = service.stub.Fetch(pb.FetchRequest(ref=ref))
    parts = aiter(call)
    await anext(parts)
    await service.stub.Delete(pb.DeleteRequest(adapter_id="a"))
    data = b"".join([part.chunk async for part in parts])
    assert data == files[CONFIG_FILE] + files[TENSORS_FILE]


async def test_a_lost_file_is_an_internal_error_of_that_revision_only(service: Running) -> None:
    lost, kept = [(await put(service.stub, "a", adapter(fill))).revision for fill in (1, 2)]
    (service.folder / "blobs" / lost.files[1].sha256).unlink()
    assert (await refused(fetch(service, lost.ref))).code == grpc.StatusCode.INTERNAL
    assert (await fetch(service, kept.ref))[0] == kept


async def test_watch_gives_a_snapshot_then_every_change(service: Running) -> None:
    one = (await put(service.stub, "a", adapter(1), alias="stable")).revision
    watch = service.stub.Watch(pb.WatchRequest())
    try:
        event = await next_event(watch)
        assert (event.version, list(event.snapshot.revisions)) == (2, [one])
        assert [a.alias for a in event.snapshot.aliases] == ["stable"]
        two = (await put(service.stub, "a", adapter(2))).revision
        await put(service.stub, "a", adapter(2))  # no change
        await service.stub.SetAlias(pb.SetAliasRequest(adapter_id="a", alias="stable"))
        await service.stub.Delete(pb.DeleteRequest(adapter_id="a", revision=one.ref.revision))
        assert await next_event(watch) == pb.CatalogEvent(version=3, put=two)
        removed = pb.Alias(adapter_id="a", alias="stable")
        assert await next_event(watch) == pb.CatalogEvent(version=4, alias_set=removed)
        assert await next_event(watch) == pb.CatalogEvent(version=5, deleted=one.ref)
    finally:
        watch.cancel()


async def test_watchers_joining_amid_changes_all_end_in_the_same_state(tmp_path: Path) -> None:
    async with running(tmp_path, watch_queue=2) as service:

        async def follow() -> set[tuple[str, str]]:
            watch = service.stub.Watch(pb.WatchRequest())
            state: dict[str, str] = {}
            version = -1
            try:
                while version < 20:
                    event = await next_event(watch)
                    if event.HasField("snapshot"):
                        state = {r.ref.adapter_id: r.ref.revision for r in event.snapshot.revisions}
                    else:
                        assert event.version == version + 1
                        state[event.put.ref.adapter_id] = event.put.ref.revision
                    version = event.version
            finally:
                watch.cancel()
            return set(state.items())

        async def fill() -> None:
            for number in range(20):
                await put(service.stub, f"a{number}", adapter(number))

        filling = asyncio.create_task(fill())
        watchers = []
        for _ in range(6):
            watchers.append(asyncio.create_task(follow()))
            await asyncio.sleep(0.02)
        await filling
        listed = {(r.ref.adapter_id, r.ref.revision) for r in (await service.stub.List(pb.ListRequest())).revisions}
        assert len(listed) == 20
        assert [await watcher == listed for watcher in watchers] == [True] * 6


async def test_a_cancelled_watch_is_forgotten(service: Running) -> None:
    for _ in range(5):
        watch = service.stub.Watch(pb.WatchRequest())
        await next_event(watch)
        watch.cancel()
    await eventually(lambda: not service.servicer._watches)


async def test_draining_ends_watches_with_unavailable(service: Running) -> None:
    watch = service.stub.Watch(pb.WatchRequest())
    await next_event(watch)
    await service.servicer.drain()
    assert (await refused(watch.read())).code == grpc.StatusCode.UNAVAILABLE


async def test_health_names_the_service(service: Running) -> None:
    health = health_pb2_grpc.HealthStub(service.channel)
    request = health_pb2.HealthCheckRequest(service="loramux.v1.AdapterStore")
    assert (await health.Check(request)).status == health_pb2.HealthCheckResponse.SERVING


async def test_a_restarted_store_holds_everything(tmp_path: Path) -> None:  # FIL-11, FLT-01
    async with running(tmp_path) as service:
        revision = (await put(service.stub, "a", GOOD, alias="stable")).revision
        before = await service.stub.List(pb.ListRequest())
    (tmp_path / "incoming" / "half").write_bytes(b"x")
    (tmp_path / "blobs" / ("0" * 64)).write_bytes(b"x")
    async with running(tmp_path) as service:
        assert await service.stub.List(pb.ListRequest()) == before
        assert (await fetch(service, revision.ref))[1] == CONFIG + TENSORS
        assert service.files() == {f.sha256 for f in revision.files}
        watch = service.stub.Watch(pb.WatchRequest())
        assert (await next_event(watch)).version == 2
        watch.cancel()


async def test_the_bound_of_the_listing_holds_for_what_is_sent(service: Running) -> None:
    names = {"adapter_id": "a" * 128, "alias": "b" * 128}
    files = {CONFIG_FILE: config(base_model_name_or_path="ü" * 1024), TENSORS_FILE: safetensors(lora())}
    await put(service.stub, names["adapter_id"], files, alias=names["alias"])
    await put(service.stub, "a", adapter(), alias="b")
    snapshot = service.store.catalog.snapshot()
    bound = sum(r.listed_bytes for r in snapshot.revisions) + sum(a.listed_bytes for a in snapshot.aliases)
    size = (await service.stub.List(pb.ListRequest())).ByteSize()
    assert size <= bound < 1.5 * size
