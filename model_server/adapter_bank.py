"""Which adapters are where: host memory, the device bank, and the rank rows each owns there. Pure; holds no tensor itself
(host weights pass through as opaque objects), decides who is evicted, and never touches what a request is using.

A row pool per group (projections that share an input, see kernels/layouts.py): a rank-r adapter takes r rows of the groups
it adapts and none of the others.

A pinned adapter is evicted from neither tier, used or not. Pins always leave a place and `max_rank` rows of every group to
the others, so no adapter that the bank could hold becomes unservable by them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from model_server.request import AdapterRef


@dataclass(slots=True)
class HostAdapter:
    """Weights laid out in host memory by the loader. `rank_rows` is how many rows each group needs; `weights` is opaque."""

    rank_rows: Mapping[str, int]
    num_bytes: int
    weights: Any
    num_users: int = 0  # requests waiting or running with it: not evicted
    last_used: int = 0


@dataclass(slots=True)
class Resident:
    index: int
    rows: dict[str, list[int]]
    num_users: int = 0  # running requests: not evicted
    last_used: int = 0
    prefetched: bool = False  # and not used since


@dataclass(frozen=True, slots=True)
class Load:
    """A copy from host to device that the engine must do before the step that needs it."""

    ref: AdapterRef
    index: int
    rows: dict[str, list[int]]
    weights: Any


@dataclass(slots=True)
class AdapterBank:
    num_rank_rows: Mapping[str, int]
    max_adapters: int
    max_rank: int
    host_bytes_limit: int
    host: dict[AdapterRef, HostAdapter] = field(default_factory=dict)
    resident: dict[AdapterRef, Resident] = field(default_factory=dict)
    pinned: dict[AdapterRef, None] = field(default_factory=dict)  # an ordered set
    num_evictions: int = 0
    _clock: int = 0
    _free_rows: dict[str, list[int]] = field(init=False)
    _free_indices: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._free_rows = {group: list(range(rows - 1, -1, -1)) for group, rows in self.num_rank_rows.items()}
        self._free_indices = list(range(self.max_adapters - 1, -1, -1))

    # Host tier -------------------------------------------------------------------------------------------------------

    @property
    def num_bytes_in_use(self) -> int:
        """Host bytes of adapters that are pinned or that waiting or running requests need."""
        return sum(adapter.num_bytes for ref, adapter in self.host.items() if adapter.num_users or ref in self.pinned)

    def has_host(self, ref: AdapterRef) -> bool:
        return ref in self.host

    def add_host(self, ref: AdapterRef, adapter: HostAdapter) -> None:
        """Keep laid-out weights. Evicts unused ones, least recently used first, to stay within the byte limit.

        What is in use, pinned or resident on the device is never dropped (host memory holds what the device holds), so
        the limit can be exceeded by those, and by nothing else.
        """
        self.host.pop(ref, None)
        self._clock += 1
        adapter.last_used = self._clock
        kept = self.resident.keys() | self.pinned.keys()
        unused = [r for r, a in self.host.items() if a.num_users == 0 and r not in kept]
        total = adapter.num_bytes + sum(a.num_bytes for a in self.host.values())
        for victim in sorted(unused, key=lambda r: self.host[r].last_used):
            if total <= self.host_bytes_limit:
                break
            total -= self.host.pop(victim).num_bytes
        self.host[ref] = adapter

    @property
    def num_free_rank_rows(self) -> int:
        """Of the fullest group: what an adapter that adapts everything could still take without an eviction."""
        return min((len(rows) for rows in self._free_rows.values()), default=0)

    def fits(self, adapter: HostAdapter) -> bool:
        """Whether it could ever be resident, alone in the bank."""
        return all(rows <= self.num_rank_rows.get(group, 0) for group, rows in adapter.rank_rows.items())

    def use_host(self, ref: AdapterRef) -> None:
        self._clock += 1
        self.host[ref].num_users += 1
        self.host[ref].last_used = self._clock

    def leave_host(self, ref: AdapterRef) -> None:
        self.host[ref].num_users -= 1

    # Pins ------------------------------------------------------------------------------------------------------------

    def can_pin(self, ref: AdapterRef) -> bool:
        """Whether the pins, it among them, leave a place and `max_rank` rows of every group to other adapters."""
        pinned = self.pinned.keys() | {ref}
        taken = {g: sum(self.host[r].rank_rows.get(g, 0) for r in pinned) for g in self.num_rank_rows}
        return len(pinned) < self.max_adapters and all(
            rows - taken[group] >= self.max_rank for group, rows in self.num_rank_rows.items()
        )

    def pin(self, ref: AdapterRef) -> None:
        """Keep it, in host memory from now on and on the device once it is there. Only after `can_pin(ref)`."""
        assert ref in self.host, "pinning what is not here"
        self.pinned[ref] = None

    def unpin(self, ref: AdapterRef) -> None:
        """It may be evicted again, as any other. Nothing where it is not pinned."""
        self.pinned.pop(ref, None)

    # Device tier -----------------------------------------------------------------------------------------------------

    def can_acquire(self, ref: AdapterRef, leaving: Mapping[AdapterRef, int] = MappingProxyType({})) -> bool:
        """Whether it is resident or could be made so, once so many running users of each adapter have left."""
        return ref in self.resident or self._victims(self.host[ref].rank_rows, leaving) is not None

    def acquire(self, ref: AdapterRef) -> tuple[int, Load | None]:
        """One more running user. Returns its index and the load to do if it was not resident, evictions done.

        Only after `can_acquire(ref)`.
        """
        load = None if ref in self.resident else self.place(ref)
        self._clock += 1
        resident = self.resident[ref]
        resident.num_users += 1
        resident.last_used = self._clock
        resident.prefetched = False
        return resident.index, load

    def place(self, ref: AdapterRef) -> Load:
        """Make it resident, without a user yet. Returns the load to do, evictions done. Only after `can_acquire(ref)`."""
        victims = self._victims(self.host[ref].rank_rows, {})
        assert victims is not None, "place without can_acquire"
        return self._place(ref, victims)

    def prefetch(self, ref: AdapterRef, spare: Collection[AdapterRef]) -> Load | None:
        """As `place`, for a waiting request. Evicts none of `spare`, and nothing prefetched while a request waits for it:
        two could evict each other for ever. None: that makes no room."""
        ahead = {r for r, resident in self.resident.items() if resident.prefetched and self.host[r].num_users}
        victims = self._victims(self.host[ref].rank_rows, {}, ahead.union(spare))
        if victims is None:
            return None
        load = self._place(ref, victims)
        self.resident[ref].prefetched = True
        return load

    def _place(self, ref: AdapterRef, victims: Iterable[AdapterRef]) -> Load:
        host = self.host[ref]
        for victim in victims:
            self._evict(victim)
        rows = {group: [self._free_rows[group].pop() for _ in range(n)] for group, n in host.rank_rows.items()}
        self._clock += 1
        self.resident[ref] = Resident(self._free_indices.pop(), rows, last_used=self._clock)
        return Load(ref, self.resident[ref].index, rows, host.weights)

    def leave(self, ref: AdapterRef) -> None:
        """One running user less. It stays resident until its rows are needed."""
        self.resident[ref].num_users -= 1

    def _victims(
        self, need: Mapping[str, int], leaving: Mapping[AdapterRef, int], spare: Collection[AdapterRef] = ()
    ) -> list[AdapterRef] | None:
        """Residents that nobody runs with, to evict for `need`: those that waiting requests want last, else the least
        recently used first. None where they are not enough. None of `spare` is among them."""
        missing = {g: n - len(self._free_rows.get(g, ())) for g, n in need.items()}
        missing_indices = 1 - len(self._free_indices)
        victims: list[AdapterRef] = []
        if missing_indices <= 0 and all(n <= 0 for n in missing.values()):
            return victims
        for ref in sorted(self.resident, key=lambda r: (self.host[r].num_users > 0, self.resident[r].last_used)):
            resident = self.resident[ref]
            if resident.num_users > leaving.get(ref, 0) or ref in self.pinned or ref in spare:
                continue
            if missing_indices <= 0 and not any(missing.get(group, 0) > 0 for group in resident.rows):
                continue  # it has nothing that is needed
            victims.append(ref)
            missing_indices -= 1
            for group, rows in resident.rows.items():
                if group in missing:
                    missing[group] -= len(rows)
            if missing_indices <= 0 and all(n <= 0 for n in missing.values()):
                return victims
        return None

    def _evict(self, ref: AdapterRef) -> None:
        resident = self.resident.pop(ref)
        assert resident.num_users == 0 and ref not in self.pinned, "evicting an adapter in use or pinned"
        self._free_indices.append(resident.index)
        for group, rows in resident.rows.items():
            self._free_rows[group].extend(rows)
        self.num_evictions += 1

    def check_integrity(self, running: Mapping[AdapterRef, int], users: Mapping[AdapterRef, int]) -> None:
        """Raise AssertionError unless rows and indices are each owned once, users are exactly those given, and the pins
        are here and leave room.

        `running`: running requests per adapter; `users`: waiting and running requests per adapter.
        """
        for group, total in self.num_rank_rows.items():
            owned = list(self._free_rows[group])
            for resident in self.resident.values():
                owned += resident.rows.get(group, [])
            assert sorted(owned) == list(range(total)), f"rank rows of {group} lost or owned twice"
        indices = self._free_indices + [r.index for r in self.resident.values()]
        assert sorted(indices) == list(range(self.max_adapters)), "adapter indices lost or owned twice"
        assert {r: s.num_users for r, s in self.resident.items() if s.num_users} == dict(running), "bank users"
        assert {r: h.num_users for r, h in self.host.items() if h.num_users} == dict(users), "host users"
        assert self.pinned.keys() <= self.host.keys(), "a pinned adapter was evicted"
        assert all(self.can_pin(ref) for ref in self.pinned), "pins leave others no room"
