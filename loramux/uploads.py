"""An adapter directory as the messages of AdapterStore.Put."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from protos import adapter_store_pb2, errors, serving
from protos.adapter_format import CONFIG_FILE, TENSORS_FILE

# Bytes sent so far, bytes in all.
Progress = Callable[[int, int], None]

# Sent only where there is nothing better, so that the store's refusal can say why pickles are not taken.
_PICKLE = "adapter_model.bin"


@dataclass(frozen=True, slots=True)
class Upload:
    """What will be sent: the header and the files it lists, in its order."""

    header: adapter_store_pb2.PutHeader
    paths: tuple[Path, ...]

    def messages(self, progress: Progress | None = None) -> Iterator[adapter_store_pb2.PutRequest]:
        """The header, then each file's bytes, read as they are sent."""
        total = sum(entry.size for entry in self.header.files)
        sent = 0
        yield adapter_store_pb2.PutRequest(header=self.header)
        for path in self.paths:
            with path.open("rb") as file:
                while chunk := file.read(serving.CHUNK_BYTES):
                    yield adapter_store_pb2.PutRequest(chunk=chunk)
                    sent += len(chunk)
                    if progress is not None:
                        progress(sent, total)


def prepare(directory: str | Path, adapter_id: str, alias: str | None) -> Upload:
    """Read sizes and digests of the adapter that PEFT saved in `directory`.

    Raises ServiceError INVALID_ARGUMENT (field `directory`) where it holds no adapter; what the files say is for the
    store to judge.
    """
    folder = Path(directory)
    if not folder.is_dir():
        raise errors.invalid_argument("directory", f"{errors.quote(str(directory))} is not a directory")
    weights = TENSORS_FILE if (folder / TENSORS_FILE).exists() or not (folder / _PICKLE).exists() else _PICKLE
    paths = tuple(folder / name for name in (CONFIG_FILE, weights) if (folder / name).is_file())
    if not paths:
        raise errors.invalid_argument(
            "directory", f"{errors.quote(str(directory))} holds no {CONFIG_FILE} or {TENSORS_FILE}"
        )
    header = adapter_store_pb2.PutHeader(adapter_id=adapter_id, alias=alias or "")
    for path in paths:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        header.files.add(name=path.name, size=path.stat().st_size, sha256=digest)
    return Upload(header, paths)
