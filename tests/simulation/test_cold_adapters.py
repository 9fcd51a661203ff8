"""In which order adapters come in, and what may keep them out."""

from __future__ import annotations

from model_server import engine_spans
from model_server.cold_adapters import MAX_READS, WINDOW
from tests.simulation.test_scheduling_bounds import finished
from tests.simulation.world import World, ref


def test_a_flood_of_cold_adapters_does_not_keep_a_more_important_one_out() -> None:
    names = {f"a{i}": 4 for i in range(100)}
    world = World(ranks=names | {"urgent": 4, "other": 4}, num_pages=512, ageing_s=1000, fetch_s=0.5)
    flood = [world.submit(4, 6, adapter=name, tenant="flooding", priority=0) for name in names]
    while not any(user.tokens for user in flood):
        world.step()
    urgent = world.submit(4, 6, adapter="urgent", tenant="flooding", priority=2)
    other = world.submit(4, 6, adapter="other", tenant="other", priority=0)
    world.run()
    # Who is being downloaded is not stopped: one fetch and one read more than their own.
    assert finished(urgent) - urgent.submitted_s < 2.0
    assert finished(other) - other.submitted_s < 3.0, "a tenant that has been given nothing comes first among equals"
    assert max(finished(user) for user in flood) > 5.0
    world.check_answers()


def test_slow_downloads_do_not_keep_out_what_is_on_local_disk() -> None:
    names = {f"far{i}": 4 for i in range(40)}
    world = World(ranks=names | {"near": 4}, num_pages=512, fetch_s=30.0)
    world.on_disk.add(ref("near"))
    far = [world.submit(4, 6, adapter=name) for name in names]
    for _ in range(3):
        world.step()
    world.read_s = 0.1
    near = world.submit(4, 6, adapter="near")
    world.run()
    assert finished(near) - near.submitted_s < 1.0 < 30.0 < min(finished(user) for user in far)
    world.check_answers()


def test_what_is_kept_on_disk_for_the_engine_is_bounded() -> None:
    """Host memory takes one at a time; of the others a window is kept on disk, not all."""
    names = {f"a{i}": 8 for i in range(60)}
    world = World(ranks=names, rank_rows=16, max_adapters=2, host_bytes_limit=100, num_pages=256)
    world.on_disk.update(ref(name) for name in names)
    users = [world.submit(4, 6, adapter=name) for name in names]
    most = 0
    while world.step():
        most = max(most, len(world.held))
    assert all(finished(user) for user in users)
    assert most <= WINDOW + MAX_READS
    world.check_answers()


def test_a_request_that_ends_while_parked_says_so() -> None:
    ranks = {"cold": 4, "warm": 4}
    world = World(ranks=ranks, broken=frozenset({"bad"}), fetch_s=1.0, max_running=1, num_pages=256)
    early = world.submit(4, 4, adapter="cold", deadline_s=0.4)
    failing = world.submit(4, 4, adapter="bad")
    world.run()
    busy = world.submit(4, 400)
    # Its adapter comes, its turn does not.
    late = world.submit(4, 4, adapter="warm", deadline_s=world.clock.now_s + 3.0)
    while not late.ended:
        world.step()
    world.cancel(busy)
    world.run()
    phases = [engine_spans.phase(user.ended) for user in (early, failing, late) if user.ended]
    assert phases == ["adapter_load", "adapter_load", "queue"]
    assert failing.ended is not None and failing.ended.adapter_load_s >= 1.0
