"""Adapters on local disk, by revision: fetched from the store once, verified against their digest, bounded in bytes.

Lives in the serving process: network and hashing stay away from the engine. A revision's directory appears by an atomic
rename once every file's digest and the revision's own are right, so what is there is whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from model_server.request import AdapterRef
from observability import logs
from protos import adapter_format, adapter_store_pb2, common_pb2, errors
from protos.adapter_store_pb2_grpc import AdapterStoreStub

log = logs.get(__name__)


class AdapterCache:
    """`ensure` and `release` belong together: a directory in use is not evicted."""

    def __init__(self, directory: Path, limit_bytes: int, store: AdapterStoreStub | None) -> None:
        self._directory = directory / "adapters"
        self._limit_bytes = limit_bytes
        self._store = store
        self._fetches: dict[str, asyncio.Task[Path]] = {}
        self._users: dict[str, int] = {}
        self._directory.mkdir(parents=True, exist_ok=True)
        # What an interrupted fetch left behind; a complete revision never has this name.
        for stale in self._directory.glob("fetching-*"):
            shutil.rmtree(stale, ignore_errors=True)

    async def ensure(self, ref: AdapterRef) -> Path:
        """The directory with the adapter's files; fetched first where it is missing, once for all who ask.

        Raises ServiceError: what the store reported, or UNAVAILABLE when it cannot be reached or sent wrong bytes.
        """
        self._users[ref.revision] = self._users.get(ref.revision, 0) + 1
        try:
            cached = self._cached(ref)
            if cached is not None:
                return cached
            fetch = self._fetches.get(ref.revision)
            if fetch is None:
                fetch = self._fetches[ref.revision] = asyncio.create_task(self._fetch(ref))
                fetch.add_done_callback(lambda _: self._fetches.pop(ref.revision))
            return await asyncio.shield(fetch)
        except BaseException:
            self.release(ref)
            raise

    def release(self, ref: AdapterRef) -> None:
        self._users[ref.revision] -= 1
        if not self._users[ref.revision]:
            del self._users[ref.revision]

    def _cached(self, ref: AdapterRef) -> Path | None:
        path = self._path(ref)
        if not path.is_dir():
            return None
        os.utime(path)  # used now: evicted later
        return path

    def _path(self, ref: AdapterRef) -> Path:
        return self._directory / adapter_format.check_revision(ref.revision).replace(":", "-")

    async def _fetch(self, ref: AdapterRef) -> Path:
        if self._store is None:
            raise errors.failed_precondition("adapter_store", ref.adapter_id, "this model server has no adapter store")
        target = self._path(ref)
        temporary = Path(tempfile.mkdtemp(prefix="fetching-", dir=self._directory))
        try:
            digests = await self._receive(ref, temporary)
            revision = adapter_format.revision_digest(digests)
            if revision != ref.revision:
                raise errors.unavailable(f"the store sent {revision} for {ref.adapter_id}@{ref.revision}")
            await asyncio.to_thread(self._keep, temporary, target)
            log.info("adapter_fetched", adapter_id=ref.adapter_id, revision=ref.revision)
            return target
        except grpc.aio.AioRpcError as error:
            reported = errors.from_rpc_error(error)
            if reported.code is grpc.StatusCode.UNAVAILABLE and not reported.details:
                # Said by gRPC, of the connection: passed on as it is, it would be taken for the model server's own.
                reported = errors.unavailable(f"the adapter store cannot be reached: {reported.message}", 1.0)
            raise reported from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    async def _receive(self, ref: AdapterRef, directory: Path) -> list[tuple[str, str]]:
        """Write the files of `ref` into `directory`; their (name, sha256). Raises UNAVAILABLE for bytes that differ."""
        assert self._store is not None
        request = adapter_store_pb2.FetchRequest(
            ref=common_pb2.AdapterRef(adapter_id=ref.adapter_id, revision=ref.revision)
        )
        digests: list[tuple[str, str]] = []
        call: Any = self._store.Fetch(request)  # the stub's types are those of blocking calls
        responses: AsyncIterator[adapter_store_pb2.FetchResponse] = aiter(call)
        try:
            header = await anext(responses, None)
            if header is None or not header.HasField("header"):
                raise errors.unavailable(f"the store sent no header for {ref.adapter_id}@{ref.revision}")
            rest = b""
            for entry in header.header.revision.files:
                if entry.name not in (adapter_format.CONFIG_FILE, adapter_format.TENSORS_FILE):
                    raise errors.unavailable(f"the store sent a file named {errors.quote(entry.name)}")
                digest, missing = hashlib.sha256(), entry.size
                with (directory / entry.name).open("wb") as file:
                    while missing:
                        if not rest:
                            message = await anext(responses, None)
                            if message is None:
                                raise errors.unavailable(f"the store's answer ends inside {entry.name}")
                            rest = message.chunk
                        piece, rest = rest[:missing], rest[missing:]
                        missing -= len(piece)
                        digest.update(piece)
                        await asyncio.to_thread(file.write, piece)
                if digest.hexdigest() != entry.sha256:
                    raise errors.unavailable(f"the store sent {entry.name} of {ref.adapter_id} with a wrong digest")
                digests.append((entry.name, digest.hexdigest()))
        finally:
            call.cancel()
        return digests

    def _keep(self, complete: Path, target: Path) -> None:
        self._make_room(_num_bytes(complete))
        with contextlib.suppress(OSError):  # another process sharing the directory was faster
            complete.rename(target)

    def _make_room(self, num_bytes: int) -> None:
        """Delete unused revisions, least recently used first, until `num_bytes` more fit."""
        entries = []
        for path in self._directory.glob("sha256-*"):
            with contextlib.suppress(OSError):
                entries.append((path.stat().st_mtime, path, _num_bytes(path)))
        total = num_bytes + sum(size for _, _, size in entries)
        for _, path, size in sorted(entries):
            if total <= self._limit_bytes:
                break
            if path.name.replace("-", ":", 1) not in self._users:
                shutil.rmtree(path, ignore_errors=True)
                total -= size


def _num_bytes(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.iterdir())
