"""The catalog as a value: what snapshots and changes make of it, and how names resolve."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.catalog import Catalog
from gateway.request import AdapterRef
from protos.errors import ServiceError


def ref(adapter_id, number):
    return AdapterRef(adapter_id, f"sha256:{number}")


def catalog(*revisions, aliases=()):
    made = Catalog()
    made.replace(revisions, aliases)
    return made


def refused(made, *args, **kwargs):
    with pytest.raises(ServiceError) as raised:
        made.resolve(*args, **kwargs)
    return raised.value


def test_newest_is_by_time_of_creation_then_of_arrival():
    made = catalog((ref("a", 2), 20.0), (ref("a", 1), 10.0))
    assert made.resolve("a") == ref("a", 2)
    made.put(ref("a", 3), 20.0)
    assert made.resolve("a") == ref("a", 3)
    made.delete(ref("a", 3))
    assert made.resolve("a") == ref("a", 2)


def test_deleting_takes_the_aliases_with_it():
    made = catalog((ref("a", 1), 1.0), (ref("a", 2), 2.0), aliases=[(ref("a", 1), "prod")])
    made.delete(ref("a", 1))
    assert refused(made, "a", alias="prod").details[0].resource_type == "alias"
    made.delete(AdapterRef("a", ""))
    assert refused(made, "a").details[0].resource_type == "adapter"
    made.delete(ref("gone", 1))
    made.set_alias(ref("gone", 1), "prod")
    assert len(made) == 0


def test_a_snapshot_replaces_everything():
    made = catalog((ref("a", 1), 1.0))
    made.replace([(ref("b", 1), 1.0)], [(ref("b", 1), "x")])
    assert made.resolve("b", alias="x") == ref("b", 1)
    assert "b" not in refused(made, "a").message
    made.set_alias(AdapterRef("b", ""), "x")
    assert refused(made, "b", alias="x")


def test_a_close_name_is_suggested_and_a_far_one_not():
    made = catalog((ref("support-de", 1), 1.0), (ref("billing", 1), 1.0))
    assert "did you mean 'support-de'?" in refused(made, "suport-de").message
    assert "did you mean 'billing'?" in refused(made, " BILLING ").message
    assert "did you mean" not in refused(made, "weather").message


def test_a_miss_among_many_is_quick_and_short():
    made = catalog(*((ref(f"adapter-{index:05}", 1), 1.0) for index in range(8000)))
    started_s = time.perf_counter()
    error = refused(made, "adapter-0000x")
    assert time.perf_counter() - started_s < 0.5
    assert "did you mean" in error.message
    assert len(refused(made, "x" * 100_000).to_status().SerializeToString()) < 2000


@given(st.lists(st.tuples(st.sampled_from(["put", "delete", "alias"]), st.sampled_from("ab"), st.integers(0, 3))))
def test_only_what_is_there_resolves(steps):
    made, there, aliases = Catalog(), {"a": {}, "b": {}}, {"a": None, "b": None}
    for now, (step, name, number) in enumerate(steps):
        if step == "put":
            made.put(ref(name, number), float(now))
            there[name].pop(number, None)
            there[name][number] = now
        elif step == "delete":
            made.delete(ref(name, number))
            there[name].pop(number, None)
            if aliases[name] == number or not there[name]:
                aliases[name] = None
        elif number in there[name]:
            made.set_alias(ref(name, number), "x")
            aliases[name] = number
    for name in "ab":
        if there[name]:
            assert made.resolve(name) == ref(name, max(there[name], key=there[name].get))
        else:
            assert refused(made, name)
        for number in range(4):
            if number in there[name]:
                assert made.resolve(name, revision=f"sha256:{number}") == ref(name, number)
        if aliases[name] is None:
            assert refused(made, name, alias="x")
        else:
            assert made.resolve(name, alias="x") == ref(name, aliases[name])
