"""The catalog against a plain model of it, and Watch against the catalog."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from adapter_store.catalog import Catalog
from adapter_store.records import Alias, Change, Deleted, Revision, Snapshot, StoredFile
from adapter_store.subscription import Subscription
from protos.errors import ServiceError


def revision(adapter_id: str, content: int) -> Revision:
    digest = f"{content:064x}"
    # Every second content shares its configuration file.
    files = (StoredFile("config", 2, f"{content // 2:064x}"), StoredFile("tensors", 9, digest))
    return Revision(adapter_id, f"sha256:{digest}", files, 1.5, "llama", 8, ("q_proj",), 2**40)


def open_catalog(folder: Path, max_bytes: int = 100_000) -> Catalog:
    return Catalog(f"sqlite:///{folder / 'catalog.db'}", max_bytes)


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    catalog = open_catalog(tmp_path)
    yield catalog
    catalog.close()


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(ServiceError) as raised:
        call()
    return raised.value.code.name


class Mirror:
    """A catalog's state as a watcher builds it: from a snapshot and the changes after it."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.version = snapshot.version
        self.revisions = {(r.adapter_id, r.revision): r for r in snapshot.revisions}
        self.aliases = {(a.adapter_id, a.alias): a.revision for a in snapshot.aliases}

    def apply(self, change: Change) -> None:
        assert change.version == self.version + 1
        self.version = change.version
        match change.what:
            case Revision() as added:
                assert (added.adapter_id, added.revision) not in self.revisions
                self.revisions[added.adapter_id, added.revision] = added
            case Alias(adapter_id, alias, ""):
                del self.aliases[adapter_id, alias]
            case Alias(adapter_id, alias, target):
                assert (adapter_id, target) in self.revisions
                self.aliases[adapter_id, alias] = target
            case Deleted(adapter_id, gone):
                assert (adapter_id, gone) not in [(a, r) for (a, _), r in self.aliases.items()]
                del self.revisions[adapter_id, gone]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mirror) and vars(self) == vars(other)


IDS = st.sampled_from(["a", "b", "org/c"])
CONTENTS = st.integers(0, 5)
ALIASES = st.sampled_from(["stable", "canary"])


class CatalogMachine(RuleBasedStateMachine):
    """Random changes, watchers of any patience, restarts: all agree with a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.loop = asyncio.new_event_loop()
        self.catalog = open_catalog(Path(self.folder.name))
        self.revisions: dict[tuple[str, str], Revision] = {}
        self.aliases: dict[tuple[str, str], str] = {}
        self.version = 0
        self.watch()

    def teardown(self) -> None:
        self.catalog.close()
        self.loop.close()
        self.folder.cleanup()

    @rule(adapter_id=IDS, content=CONTENTS, alias=st.one_of(st.just(""), ALIASES))
    def put(self, adapter_id: str, content: int, alias: str) -> None:
        wanted = revision(adapter_id, content)
        key = (adapter_id, wanted.revision)
        created = key not in self.revisions
        assert self.catalog.put(wanted, alias) == (wanted, created)
        self.revisions.setdefault(key, wanted)
        self.version += created
        if alias and self.aliases.get((adapter_id, alias)) != wanted.revision:
            self.aliases[adapter_id, alias] = wanted.revision
            self.version += 1

    @rule(adapter_id=IDS, content=CONTENTS, alias=ALIASES)
    def set_alias(self, adapter_id: str, content: int, alias: str) -> None:
        wanted = Alias(adapter_id, alias, revision(adapter_id, content).revision)
        if (adapter_id, wanted.revision) not in self.revisions:
            assert refused(lambda: self.catalog.set_alias(wanted)) == "NOT_FOUND"
            return
        previous = self.aliases.get((adapter_id, alias), "")
        assert self.catalog.set_alias(wanted) == previous
        self.aliases[adapter_id, alias] = wanted.revision
        self.version += previous != wanted.revision

    @rule(adapter_id=IDS, alias=ALIASES)
    def remove_alias(self, adapter_id: str, alias: str) -> None:
        if (adapter_id, alias) not in self.aliases:
            assert refused(lambda: self.catalog.set_alias(Alias(adapter_id, alias, ""))) == "NOT_FOUND"
            return
        assert self.catalog.set_alias(Alias(adapter_id, alias, "")) == self.aliases.pop((adapter_id, alias))
        self.version += 1

    @rule(adapter_id=IDS, content=CONTENTS)
    def delete_revision(self, adapter_id: str, content: int) -> None:
        wanted = revision(adapter_id, content).revision
        if (adapter_id, wanted) not in self.revisions:
            assert refused(lambda: self.catalog.delete(adapter_id, wanted)) == "NOT_FOUND"
        elif any(key[0] == adapter_id and target == wanted for key, target in self.aliases.items()):
            assert refused(lambda: self.catalog.delete(adapter_id, wanted)) == "FAILED_PRECONDITION"
        else:
            gone = {file.sha256 for file in self.revisions.pop((adapter_id, wanted)).files}
            assert self.catalog.delete(adapter_id, wanted) == (1, frozenset(gone - self.digests()))
            self.version += 1

    @precondition(lambda self: self.revisions)
    @rule(adapter_id=IDS)
    def delete_adapter(self, adapter_id: str) -> None:
        mine = [key for key in self.revisions if key[0] == adapter_id]
        if not mine:
            assert refused(lambda: self.catalog.delete(adapter_id)) == "NOT_FOUND"
            return
        gone = {file.sha256 for key in mine for file in self.revisions.pop(key).files}
        pointing = [key for key in self.aliases if key[0] == adapter_id]
        for key in pointing:
            del self.aliases[key]
        assert self.catalog.delete(adapter_id) == (len(mine), frozenset(gone - self.digests()))
        self.version += len(mine) + len(pointing)

    @rule()
    def restart(self) -> None:
        self.catalog.close()
        self.catalog = open_catalog(Path(self.folder.name))
        self.watch()

    @rule()
    def follow(self) -> None:
        """The watchers read what waits for them and know all the catalog does."""
        expected = Mirror(self.catalog.snapshot())
        for index, (subscription, mirror) in enumerate(self.watchers):
            while mirror.version < self.version:
                change = self.loop.run_until_complete(asyncio.wait_for(subscription.next(), 5))
                if change is None:
                    mirror = Mirror(self.catalog.attach(subscription))
                    self.watchers[index] = (subscription, mirror)
                else:
                    mirror.apply(change)
            assert mirror == expected

    def watch(self) -> None:
        subscriptions = [Subscription(self.loop, limit) for limit in (1, 3, 1000)]
        self.watchers = [(s, Mirror(self.catalog.attach(s))) for s in subscriptions]

    def digests(self) -> set[str]:
        return {file.sha256 for held in self.revisions.values() for file in held.files}

    @invariant()
    def agrees_with_the_model(self) -> None:
        snapshot = self.catalog.snapshot()
        assert snapshot.version == self.version
        assert {(r.adapter_id, r.revision): r for r in snapshot.revisions} == self.revisions
        assert {(a.adapter_id, a.alias): a.revision for a in snapshot.aliases} == self.aliases
        assert self.catalog.digests() == self.digests()


def test_random_changes_agree_with_a_model() -> None:
    run_state_machine_as_test(CatalogMachine, settings=settings(max_examples=20, stateful_step_count=25, deadline=None))


def test_the_newest_revision_is_the_last_put(catalog: Catalog) -> None:
    for content in (7, 3, 5):
        catalog.put(revision("a", content))
    catalog.put(revision("b", 9), alias="stable")
    catalog.put(revision("a", 7))  # there already: not new
    assert catalog.get("a") == revision("a", 5)
    assert [r.revision for r in catalog.snapshot("a").revisions] == [revision("a", c).revision for c in (5, 3, 7)]
    assert catalog.get("b", alias="stable") == revision("b", 9)
    assert catalog.snapshot("a").aliases == ()
    catalog.delete("a", revision("a", 5).revision)
    assert catalog.get("a") == revision("a", 3)


@pytest.mark.parametrize(
    ("query", "resource"),
    [
        (("A",), "adapter"), (("",), "adapter"), ((" a",), "adapter"), (("aa",), "adapter"), (("a\0",), "adapter"),
        (("a", "sha256:0"), "revision"), (("a", "", "Stable"), "alias"), (("b", "", "stable"), "adapter"),
    ],
)  # fmt: skip
def test_near_misses_are_not_found(catalog: Catalog, query: tuple[str, ...], resource: str) -> None:  # LIF-17
    catalog.put(revision("a", 1), alias="stable")
    with pytest.raises(ServiceError) as raised:
        catalog.get(*query)
    assert raised.value.code.name == "NOT_FOUND"
    assert raised.value.details[0].resource_type == resource  # type: ignore[attr-defined]


def test_a_full_catalog_refuses_and_stays_as_it_was(tmp_path: Path) -> None:
    one = revision("a", 1)
    catalog = open_catalog(tmp_path, one.listed_bytes + Alias("a", "stable", one.revision).listed_bytes)
    catalog.put(revision("a", 1), alias="stable")
    before = catalog.snapshot()
    assert refused(lambda: catalog.put(revision("a", 2))) == "RESOURCE_EXHAUSTED"
    assert refused(lambda: catalog.set_alias(Alias("a", "canary", one.revision))) == "RESOURCE_EXHAUSTED"
    assert catalog.snapshot() == before
    catalog.put(revision("a", 1), alias="stable")
    catalog.set_alias(Alias("a", "stable", ""))
    catalog.delete("a")
    catalog.put(revision("a", 2), alias="stable")
    catalog.close()


def test_a_failed_put_changes_nothing(catalog: Catalog) -> None:
    broken = dataclasses.replace(revision("a", 1), files=(StoredFile("x", 1, "0"), StoredFile("y", 2, None)))  # type: ignore[arg-type]
    with pytest.raises(Exception, match="NOT NULL"):
        catalog.put(broken, alias="stable")
    assert catalog.snapshot() == Snapshot(0, (), ())


async def test_a_slow_watcher_is_bounded_and_gets_a_snapshot(catalog: Catalog) -> None:
    subscription = Subscription(asyncio.get_running_loop(), 4)
    catalog.attach(subscription)
    for content in range(9):
        catalog.put(revision("a", content))
    assert len(subscription._changes) <= 4
    assert await subscription.next() is None
    assert catalog.attach(subscription).version == 9
    catalog.put(revision("a", 9))
    change = await subscription.next()
    assert change is not None and change.version == 10


async def test_a_watcher_waits_for_changes_made_on_other_threads(catalog: Catalog) -> None:
    subscription = Subscription(asyncio.get_running_loop(), 4)
    catalog.attach(subscription)
    waiting = asyncio.create_task(subscription.next())
    await asyncio.to_thread(catalog.put, revision("a", 1))
    assert await asyncio.wait_for(waiting, 5) == Change(1, revision("a", 1))


async def test_closed_watchers_are_forgotten_and_end(catalog: Catalog) -> None:
    subscriptions = [Subscription(asyncio.get_running_loop(), 4) for _ in range(3)]
    for subscription in subscriptions:
        catalog.attach(subscription)
    waiting = asyncio.create_task(subscriptions[0].next())
    await asyncio.sleep(0)
    for subscription in subscriptions:
        subscription.close()
    with pytest.raises(ServiceError) as raised:
        await asyncio.wait_for(waiting, 5)
    assert raised.value.code.name == "UNAVAILABLE"
    catalog.put(revision("a", 1))
    assert catalog._subscriptions == []
