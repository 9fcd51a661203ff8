"""Adapters that requests or pins wait for, on their way to host memory: which is asked for next, which is read next. Pure.

Three stretches, each with places of its own, so that nobody waits behind another's slow one: a look at local disk, a
download of what is not there, reading into host memory. On each the most important goes first, whenever it came; what
lies on disk and has fallen behind the window is let go of, to be looked for again when its turn comes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from model_server.request import AdapterRef

MAX_DOWNLOADS: Final = 8
MAX_READS: Final = 8
# How many of the most important are dealt with before the others: of those to be read, and of those to be downloaded.
WINDOW: Final = 16


@dataclass(slots=True)
class ColdAdapters:
    """`order` in every method: all that are wanted and not in host memory, most important first."""

    _looking: set[AdapterRef] = field(default_factory=set)
    _downloading: set[AdapterRef] = field(default_factory=set)
    _missing: set[AdapterRef] = field(default_factory=set)  # looked for, and not on local disk
    _on_disk: dict[AdapterRef, str] = field(default_factory=dict)  # kept there for us
    _reading: set[AdapterRef] = field(default_factory=set)

    # What became of one --------------------------------------------------------------------------------------------

    def missing(self, ref: AdapterRef) -> None:
        self._looking.discard(ref)
        self._missing.add(ref)

    def on_disk(self, ref: AdapterRef, path: str) -> None:
        self.gone(ref)
        self._on_disk[ref] = path

    def gone(self, ref: AdapterRef) -> None:
        """In host memory, or failed."""
        for stretch in (self._looking, self._downloading, self._missing, self._reading):
            stretch.discard(ref)
        self._on_disk.pop(ref, None)

    # What to do ----------------------------------------------------------------------------------------------------

    def to_ask(self, order: Sequence[AdapterRef]) -> list[tuple[AdapterRef, bool]]:
        """Whom to ask for now, and whether it may be downloaded; without that the answer may be that it is missing."""
        self._missing.intersection_update(order)
        asked: list[tuple[AdapterRef, bool]] = []
        num_near = num_far = 0
        for ref in order:
            far = ref in self._missing or ref in self._downloading
            num_near, num_far = num_near + (not far), num_far + far
            if (num_far if far else num_near) > WINDOW:
                if num_near >= WINDOW and num_far >= WINDOW:
                    break
                continue
            if ref in self._downloading or ref in self._looking or ref in self._on_disk or ref in self._reading:
                continue
            if len(self._downloading) < MAX_DOWNLOADS:
                self._downloading.add(ref)
                asked.append((ref, True))
            elif not far:
                self._looking.add(ref)
                asked.append((ref, False))
        return asked

    def to_read(
        self, order: Sequence[AdapterRef], may_exceed: Callable[[AdapterRef], bool] | None
    ) -> list[tuple[AdapterRef, str]]:
        """Whom to read now, and where it lies. `may_exceed`: host memory is full, and whether this one may come in all the
        same, alone; None: it is not full."""
        started: list[tuple[AdapterRef, str]] = []
        for ref in order if self._on_disk else ():
            if len(self._reading) >= MAX_READS or (may_exceed is not None and self._reading):
                break
            if ref in self._on_disk and (may_exceed is None or may_exceed(ref)):
                self._reading.add(ref)
                started.append((ref, self._on_disk.pop(ref)))
        return started

    def to_let_go(self, order: Sequence[AdapterRef]) -> list[AdapterRef]:
        """What lies on disk for us and is not wanted, or not soon."""
        if not self._on_disk:
            return []
        near = [ref for ref in order if ref not in self._missing and ref not in self._downloading][:WINDOW]
        away = self._on_disk.keys() - set(near)
        for ref in away:
            del self._on_disk[ref]
        return sorted(away, key=lambda ref: (ref.adapter_id, ref.revision))
