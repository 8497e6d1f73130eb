"""Units in other processes: the same candidates for any number of workers, and workers that die,
hang back, or come from Ray lose nothing but their own share.
"""

from __future__ import annotations

import functools
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from obelisk.app.loading import load_program
from obelisk.app.search_bench import decoder_layer
from obelisk.base.errors import MissingDependency, UserError
from obelisk.ir import Graph
from obelisk.machine import find
from obelisk.search import Budget, SearchResult, Space, search
from obelisk.search import pool as pools
from obelisk.search.partition import Partition
from obelisk.search.pool import Local, Pool
from obelisk.search.units import (
    Bench,
    Limits,
    Outcome,
    Task,
    context_of,
    outcome,
    read_sizes,
    read_skeleton,
    sizes_plain,
    skeleton_plain,
    synthesis_tasks,
)

CPU = find("cpu")
BOTH = pytest.mark.parametrize("fork", [True, False], ids=["forked", "fresh"])
PLENTY = Limits(60.0, 10**9, 8 << 30)


def never() -> str:
    return ""


def answer(result: SearchResult) -> list[tuple[str, float, str]]:
    """What must not depend on who did the work."""
    return [(c.graph.digest, c.cost.seconds, c.note) for c in result.candidates]


@functools.cache
def by_one(name: str, seed: int = 0) -> SearchResult:
    """The search of a named program in this process alone."""
    return search(load_program(name), CPU, workers=1, seed=seed)


def counts(result: SearchResult) -> tuple[object, ...]:
    s = result.stats
    return (s.states, s.bank_hits, dict(s.pruned), s.skeletons, s.instances, s.units, s.segments)


@pytest.fixture
def tasks() -> Callable[[Graph], list[Task]]:
    def make(program: Graph) -> list[Task]:
        partition = Partition(program, CPU, 16)
        whole = partition.interval(0, len(partition.order))
        assert whole is not None
        assert whole.segment is not None
        return list(synthesis_tasks(whole.segment, "whole", whole.start, whole.stop, Space()))

    return make


@pytest.mark.parametrize(
    ("name", "workers", "fork"), [("rmsnorm", 2, True), ("gqa", 3, False), ("gated_mlp", 2, True)]
)
def test_any_number_of_workers_gives_the_same_candidates_byte_for_byte(
    name: str, workers: int, fork: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process and several, forked or fresh: same candidates, order, costs, notes and counts."""
    if not fork:
        fresh(monkeypatch)
    alone = by_one(name, 3)
    assert alone.stats.workers == 0
    shared = search(load_program(name), CPU, workers=workers, seed=3, patience=0.0)
    assert shared.stats.workers == workers
    assert answer(shared) == answer(alone)
    assert counts(shared) == counts(alone)


def test_workers_that_start_late_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the units here, half in workers that came up meanwhile."""
    fresh(monkeypatch)
    program = load_program("rmsnorm")
    late = search(program, CPU, workers=2, patience=0.05)
    assert answer(late) == answer(by_one("rmsnorm"))


def test_skeletons_and_outcomes_survive_their_plain_form(
    tasks: Callable[[Graph], list[Task]],
) -> None:
    """What travels and what is stored reads back equal, constants and sizes included."""
    program = load_program("attention")
    bench = Bench(context_of(program, CPU, Space(), 0), program, never)
    seen = 0
    for task in tasks(program):
        result = bench.run(task, PLENTY)
        assert outcome(result.plain()) == result
        for plain, sizes, seconds in result.found:
            skeleton = read_skeleton(plain)
            assert skeleton_plain(skeleton) == plain
            assert sizes_plain(read_sizes(sizes)) == sizes
            assert seconds > 0
            seen += any(s.op[0] == "const" for s in skeleton.steps)
    assert seen > 5


def test_a_unit_depends_on_nothing_but_itself(tasks: Callable[[Graph], list[Task]]) -> None:
    """Done first or last, in a bench that did others or none: equal, but for the time it took."""
    program = load_program("gqa")
    context = context_of(program, CPU, Space(), 0)
    todo = tasks(program)
    used = Bench(context, program, never)

    def essence(result: Outcome) -> object:
        return {**result.plain(), "seconds": 0, "memory": 0, "moments": 0}

    in_turn = [essence(used.run(t, PLENTY)) for t in todo]
    fresh = [essence(Bench.from_text(context, never).run(t, PLENTY)) for t in reversed(todo)]
    assert in_turn == fresh[::-1]
    assert any(r["found"] for r in in_turn)  # type: ignore[index]


def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on workers are fresh interpreters, as where this process has other threads."""
    monkeypatch.setattr(pools, "can_fork", lambda: False)


def run_all(executor: Pool | Local, todo: list[Task], seconds: float = 60.0) -> dict[str, Outcome]:
    for task in todo:
        executor.submit(task)
    out: dict[str, Outcome] = {}
    ends = time.monotonic() + seconds
    while len(out) < len(todo) and time.monotonic() < ends:
        out.update((r.key, r) for r in executor.results(0.1))
    return out


def up(pool: Pool, n: int) -> None:
    """Wait until the workers are there; they have nothing to do yet."""
    ends = time.monotonic() + 60
    while len(pool.pids) < n and time.monotonic() < ends:
        assert pool.results(0.1) == []
    assert len(pool.pids) == n


@BOTH
def test_a_killed_worker_loses_only_its_own_share(
    fork: bool, tasks: Callable[[Graph], list[Task]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL in the middle of a unit: that unit is done again, all outcomes are there and the
    same.
    """
    if not fork:
        fresh(monkeypatch)
    program = load_program("attention")
    context = context_of(program, CPU, Space(), 0)
    todo = tasks(program)
    expected = run_all(Local(context, program, lambda: PLENTY, never), todo)
    pool = Pool(context, program, lambda: PLENTY, never, 2, patience=0.0)
    try:
        pool.start()
        up(pool, 2)
        for task in todo:
            pool.submit(task)
        pool.results(0.0)  # hands out the first units
        os.kill(pool.pids[0], signal.SIGKILL)
        got = run_all(pool, [], 0)
        ends = time.monotonic() + 60
        while len(got) < len(todo) and time.monotonic() < ends:
            got.update((r.key, r) for r in pool.results(0.1))
    finally:
        pool.close()
    assert pool.retried == 1
    assert pool.dropped == 0
    assert {k: r.found for k, r in got.items()} == {k: r.found for k, r in expected.items()}


def deadly(monkeypatch: pytest.MonkeyPatch, victim: str, most: int, folder: Path) -> None:
    """From now on workers die of SIGKILL at units whose key has `victim` in it, `most` times."""
    poison = (
        "from obelisk.search.units import Bench;import pathlib,signal;run=Bench.run;"
        f"folder=pathlib.Path({str(folder)!r});\n"
        "def fatal(self,task,limits):\n"
        f"  died=len(list(folder.iterdir()))\n"
        f"  if {victim!r} in task.key and died<{most}:\n"
        "    try: (folder/str(died)).touch(exist_ok=False)\n"
        "    except FileExistsError: pass\n"  # the other worker took this death
        "    else: os.kill(os.getpid(),signal.SIGKILL)\n"
        "  return run(self,task,limits)\n"
        "Bench.run=fatal\n"
    )
    fresh(monkeypatch)
    before, mark, after = pools._PROLOGUE.partition("from obelisk.search.pool import serve;")
    monkeypatch.setattr(pools, "_PROLOGUE", before + "\n" + poison + mark + after)


def test_a_unit_that_kills_twice_is_given_up_and_counted(
    tasks: Callable[[Graph], list[Task]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The others are done; the one is an outcome of its own kind."""
    program = load_program("rmsnorm")
    todo = tasks(program)
    victim = todo[1].key
    deadly(monkeypatch, victim, 5, tmp_path)
    context = context_of(program, CPU, Space(), 0)
    pool = Pool(context, program, lambda: PLENTY, never, 1, patience=0.0)
    try:
        pool.start()
        up(pool, 1)
        got = run_all(pool, todo)
    finally:
        pool.close()
    assert (len(list(tmp_path.iterdir())), pool.retried, pool.dropped) == (2, 1, 1)
    assert got[victim].stopped == "dropped"
    assert not any(r.stopped for k, r in got.items() if k != victim)
    assert sorted(got) == sorted(t.key for t in todo)


def test_a_search_whose_worker_dies_gives_the_same_candidates(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The death is counted in the account and changes nothing else."""
    program = load_program("gated_mlp")
    deadly(monkeypatch, "/sizes/", 1, tmp_path)
    shared = search(program, CPU, workers=2, patience=0.0)
    assert len(list(tmp_path.iterdir())) == 1
    assert shared.stats.retried == 1
    assert shared.stats.dropped == 0
    assert answer(shared) == answer(by_one("gated_mlp"))


def test_a_process_with_threads_is_not_forked() -> None:
    """A fork would inherit locks that other threads hold; and forks are what there is else."""
    assert pools.can_fork() == (threading.active_count() == 1)
    over = threading.Event()
    other = threading.Thread(target=over.wait)
    other.start()
    try:
        assert not pools.can_fork()
    finally:
        over.set()
        other.join()


def test_long_units_go_first_and_nothing_else_moves(tasks: Callable[[Graph], list[Task]]) -> None:
    """Within an interval syntheses without a split axis come first; intervals keep their order."""
    program = load_program("attention")
    first = tasks(program)
    second = [Task(t.key + "2", t.start + 1, t.stop, t.mode, t.split) for t in first]
    pool = Pool(context_of(program, CPU, Space(), 0), program, lambda: PLENTY, never, 2)
    for task in (*first, *second):
        pool.submit(task)
    queued = list(pool._tasks)
    pool.close()
    assert sorted(t.key for t in queued) == sorted(t.key for t in (*first, *second))
    assert [t.start for t in queued] == sorted(t.start for t in queued)
    for part in (queued[: len(first)], queued[len(first) :]):
        splits = [t.split is not None for t in part]
        assert splits == sorted(splits)
    assert [t.key for t in queued] != [t.key for t in (*first, *second)]


@BOTH
def test_no_worker_outlives_the_search(fork: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing ends them at once, also when they are busy."""
    if not fork:
        fresh(monkeypatch)
    program = load_program("qknorm")
    pool = Pool(context_of(program, CPU, Space(), 0), program, lambda: PLENTY, never, 2, 0.0)
    pool.start()
    up(pool, 2)
    pids = pool.pids
    pool.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_worker_that_cannot_live_is_not_started_for_ever(
    monkeypatch: pytest.MonkeyPatch, tasks: Callable[[Graph], list[Task]]
) -> None:
    """Where every worker dies at once the units are done here."""
    fresh(monkeypatch)
    monkeypatch.setattr(pools, "_PROLOGUE", "raise SystemExit(3)")
    program = load_program("lora")
    context = context_of(program, CPU, Space(), 0)
    pool = Pool(context, program, lambda: PLENTY, never, 2, 0.0)
    try:
        got = run_all(pool, tasks(program))
    finally:
        pool.close()
    assert all(not r.stopped for r in got.values())
    assert len(got) == len(tasks(program))


def test_memory_bound_stops_the_search_with_its_name() -> None:
    """Here and in workers: a bound below what a process needs ends it, with what there is."""
    program = load_program("gqa")
    for workers in (1, 2):
        result = search(
            program, CPU, workers=workers, patience=0.0, budget=Budget(seconds=30, memory=1 << 20)
        )
        assert result.stats.stopped == "memory"
        assert result.candidates[0].graph is program


def test_a_worker_over_its_bound_reports_it(tasks: Callable[[Graph], list[Task]]) -> None:
    """The bound holds for each worker by itself."""
    program = load_program("gqa")
    pool = Pool(
        context_of(program, CPU, Space(), 0),
        program,
        lambda: Limits(60.0, 10**9, 1 << 20),
        never,
        1,
        0.0,
    )
    try:
        pool.start()
        up(pool, 1)
        got = run_all(pool, tasks(program)[:1])
    finally:
        pool.close()
    assert [r.stopped for r in got.values()] == ["memory"]


@pytest.mark.alone
def test_ctrl_c_with_workers_returns_the_best_so_far() -> None:
    """SIGINT in the middle of a search of many seconds: what is finished is returned, in time."""
    program = decoder_layer()
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        result = search(program, CPU, workers=2, patience=0.0, budget=Budget(seconds=60))
    finally:
        timer.cancel()
    assert result.stats.stopped == "interrupted"
    assert result.candidates[0].graph is program
    assert result.stats.seconds < 20


@pytest.mark.parametrize("wrong", [0, -1, "many", "tcp://x"])
def test_a_wrong_number_of_workers_is_refused(wrong: int | str) -> None:
    """With the value and what is expected."""
    with pytest.raises(UserError, match="workers is"):
        search(load_program("lora"), CPU, workers=wrong)


def test_ray_gives_the_same_candidates() -> None:
    """A local Ray started here; the same code path, the same bytes."""
    ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
    program = load_program("rmsnorm")
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
        try:
            shared = search(program, CPU, workers="ray", seed=3)
        finally:
            ray.shutdown()
    assert shared.stats.workers == 2
    assert answer(shared) == answer(by_one("rmsnorm", 3))
    assert counts(shared) == counts(by_one("rmsnorm", 3))


def test_a_killed_ray_actor_loses_only_its_own_share(
    tasks: Callable[[Graph], list[Task]],
) -> None:
    """What it was at is done again elsewhere; all outcomes are there and the same."""
    ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
    from obelisk.search.ray_pool import RayPool

    program = load_program("attention")
    context = context_of(program, CPU, Space(), 0)
    todo = tasks(program)
    expected = run_all(Local(context, program, lambda: PLENTY, never), todo)
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
        pool = RayPool(context, lambda: PLENTY, "ray", workers=2)
        try:
            for task in todo:
                pool.submit(task)
            pool.results(0.0)  # hands out the first units
            ray.kill(pool._actors[0])
            got: dict[str, Outcome] = {}
            ends = time.monotonic() + 60
            while len(got) < len(todo) and time.monotonic() < ends:
                got.update((r.key, r) for r in pool.results(0.1))
        finally:
            pool.close()
            ray.shutdown()
    assert pool.retried == 1
    assert pool.dropped == 0
    assert {k: r.found for k, r in got.items()} == {k: r.found for k, r in expected.items()}


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not an ImportError from the depths."""
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(MissingDependency, match=r"obelisk\[ray\]"):
        search(load_program("lora"), CPU, workers="ray")
