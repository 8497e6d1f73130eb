"""The search as a whole: durable, interruptible, bounded, and honest in its account."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from obelisk.app.loading import load_program
from obelisk.base.errors import ParseError, UserError
from obelisk.base.interrupt import Interrupts
from obelisk.ir import Graph, KernelGraph
from obelisk.ir.text import to_text
from obelisk.machine import find
from obelisk.search import (
    Budget,
    SearchResult,
    Space,
    driver,
    read_candidates,
    search,
    units,
    write_candidates,
)
from obelisk.search import checkpoint as checkpoints
from obelisk.search.units import Bench, Limits, Outcome, Task

CPU = find("cpu")


def answer(result: SearchResult) -> list[tuple[str, float, str]]:
    return [(c.graph.digest, c.cost.seconds, c.note) for c in result.candidates]


def units_of(path: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads(path.read_text())["units"]
    return found


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keys of the units that are really done in this process, in order."""
    done: list[str] = []
    original = Bench.run

    def run(self: Bench, task: Task, limits: Limits) -> Outcome:
        done.append(task.key)
        return original(self, task, limits)

    monkeypatch.setattr(Bench, "run", run)
    return done


class CtrlC:
    """Listens to progress and interrupts once enough states are seen."""

    def __init__(self, states: int) -> None:
        self.states = states
        self.raised = False

    def update(self, stage: str, counts: Mapping[str, float | int | str]) -> None:
        if not self.raised and int(counts["states"]) > self.states:
            self.raised = True
            raise KeyboardInterrupt


def test_a_stopped_search_goes_on_without_repeating_a_unit(
    tmp_path: Path, recorded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted at half: the second run does only the rest, and the end is the same."""
    monkeypatch.setattr(driver, "REPORT_SECONDS", 0.0)
    monkeypatch.setattr(units, "TICK_SECONDS", 0.0)
    program, file = load_program("mlp"), tmp_path / "half.json"
    whole = search(program, CPU, workers=1)
    everything = list(recorded)
    recorded.clear()
    half = search(program, CPU, workers=1, checkpoint=file, progress=CtrlC(whole.stats.states // 2))
    assert half.stats.stopped == "interrupted"
    kept = set(units_of(file))
    assert 0 < len(kept) < len(everything)
    recorded.clear()
    rest = search(program, CPU, workers=1, resume=file)
    assert not kept & set(recorded)
    assert kept | set(recorded) == set(everything)
    assert rest.stats.resumed == len(kept)
    assert answer(rest) == answer(whole)
    assert rest.stats.states == whole.stats.states
    assert set(units_of(file)) == set(everything)
    recorded.clear()
    assert answer(search(program, CPU, workers=1, resume=file)) == answer(whole)
    assert recorded == []


_KILLED = """
import sys
from pathlib import Path
from obelisk.app.loading import load_program
from obelisk.machine import find
from obelisk.search import Budget, search
from obelisk.search import checkpoint
checkpoint.EVERY_SECONDS = 0.0
search(load_program("qknorm"), find("cpu"), workers=int(sys.argv[2]), patience=0.0,
       checkpoint=Path(sys.argv[1]), budget=Budget(seconds=120))
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_search_goes_on(tmp_path: Path, workers: int) -> None:
    """SIGKILL of the whole process, no chance to write: what was on disk is not done again."""
    file = tmp_path / "killed.json"
    process = subprocess.Popen([sys.executable, "-c", _KILLED, str(file), str(workers)])
    try:
        ends = time.monotonic() + 60
        while not (file.exists() and units_of(file)) and time.monotonic() < ends:
            assert process.poll() in (None, 0)
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
    kept = len(units_of(file))
    assert kept > 0
    program = load_program("qknorm")
    rest = search(program, CPU, workers=1, resume=file)
    assert rest.stats.resumed == kept
    assert rest.stats.stopped == "exhausted"
    assert answer(rest) == answer(search(program, CPU, workers=1))


def test_the_checkpoint_is_always_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader at any moment sees a complete file, and nothing is left beside it."""
    monkeypatch.setattr(checkpoints, "EVERY_SECONDS", 0.0)
    file = tmp_path / "c.json"
    sizes: list[int] = []
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            if file.exists():
                sizes.append(len(units_of(file)))

    watcher = threading.Thread(target=watch)
    watcher.start()
    search(load_program("gated_mlp"), CPU, workers=1, checkpoint=file)
    over.set()
    watcher.join()
    assert sizes == sorted(sizes)
    assert os.listdir(tmp_path) == ["c.json"]


def test_a_checkpoint_of_another_search_is_refused(tmp_path: Path) -> None:
    """By what differs: program, machine, space, seed."""
    file = tmp_path / "c.json"
    program = load_program("lora")
    search(program, CPU, workers=1, checkpoint=file)
    cases: list[tuple[str, Callable[[], SearchResult]]] = [
        ("program", lambda: search(load_program("lora", 2), CPU, resume=file)),
        ("machine", lambda: search(program, find("sm_90a"), resume=file)),
        ("space", lambda: search(program, CPU, space=Space(grid_axes=2), resume=file)),
        ("seed", lambda: search(program, CPU, seed=1, resume=file)),
    ]
    for word, call in cases:
        with pytest.raises(UserError, match=f"another search.*{word}"):
            call()


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"format": "x"}', '{"format": "obelisk-search", "version": 99}'],
)
def test_a_damaged_checkpoint_is_refused(tmp_path: Path, text: str) -> None:
    """With the file's name; never a traceback from inside."""
    file = tmp_path / "bad.json"
    file.write_text(text)
    with pytest.raises(ParseError, match=r"bad\.json"):
        search(load_program("lora"), CPU, resume=file)
    with pytest.raises(ParseError, match=r"none\.json"):
        search(load_program("lora"), CPU, resume=tmp_path / "none.json")


def test_ctrl_c_returns_the_best_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later interruption, no worse best; the checkpoint is written."""
    monkeypatch.setattr(driver, "REPORT_SECONDS", 0.0)
    monkeypatch.setattr(units, "TICK_SECONDS", 0.0)
    program = load_program("rmsnorm")
    whole = search(program, CPU, workers=1)
    last = float("inf")
    for share in (0.0, 0.5, 0.9):
        listener = CtrlC(int(whole.stats.states * share))
        file = tmp_path / f"{share}.json"
        result = search(program, CPU, workers=1, progress=listener, checkpoint=file)
        assert result.stats.stopped == "interrupted"
        assert result.candidates[0].graph is program
        assert file.exists()
        best = min(c.cost.seconds for c in result.candidates)
        assert best <= last
        last = best
    assert last <= whole.candidates[0].cost.seconds


@pytest.mark.alone
def test_a_signal_returns_what_there_is() -> None:
    """The real SIGINT, in the middle of a unit."""
    program = load_program("qknorm_k")

    class Listener:
        pressed = False

        def update(self, stage: str, counts: Mapping[str, float | int | str]) -> None:
            if stage == "search" and counts["states"] and not self.pressed:
                self.pressed = True
                signal.raise_signal(signal.SIGINT)

    result = search(program, CPU, workers=1, progress=Listener())
    assert result.stats.stopped == "interrupted"
    assert result.candidates


def test_limits_stop_with_their_names() -> None:
    """Seconds and states; the number of states is kept to within one unit's check."""
    program = load_program("ntrans")
    timed = search(program, CPU, workers=1, budget=Budget(seconds=0.05))
    assert timed.stats.stopped == "time"
    assert timed.stats.seconds < 3.0
    few = search(program, CPU, workers=1, budget=Budget(states=2000))
    assert few.stats.stopped == "states"
    assert 2000 < few.stats.states < 4000


def layers(depth: int) -> Graph:
    """Gated products in a row: equal segments again and again."""
    g = KernelGraph("layers")
    x = g.input((16, 64))
    for _ in range(depth):
        w, v = g.input((64, 64)), g.input((64, 64))
        x = g.add(x, g.mul(g.silu(g.matmul(x, w)), g.matmul(x, v)))
    g.output(x)
    return g.freeze()


def test_equal_segments_are_searched_once() -> None:
    """Eight layers ask for little more than two."""
    two, eight = (search(layers(n), CPU, workers=1, space=Space(window=4)) for n in (2, 8))
    assert eight.stats.stopped == "exhausted"
    assert eight.stats.reused > eight.stats.segments
    assert eight.stats.states < 1.5 * two.stats.states
    assert eight.candidates[1].cost.launches < eight.candidates[0].cost.launches


def test_the_account_adds_up() -> None:
    """Levels repeat the totals; every stage took time; nothing is counted for nothing."""
    stats = search(load_program("gqa"), CPU, workers=1).stats
    levels = stats.levels
    assert levels["block"]["states"] == stats.states > 1000
    assert levels["block"]["bank hits"] == stats.bank_hits > 0
    assert levels["block"]["skeletons"] == stats.skeletons > 3
    assert levels["sizes"]["instances"] == stats.instances > stats.skeletons
    assert levels["program"]["segments"] == stats.segments >= 1
    pruned = sum(n for level in levels.values() for k, n in level.items() if "pruned" in k)
    assert pruned == sum(stats.pruned.values()) > 0
    assert {"synthesis", "sizes", "partition", "assembly"} <= set(stats.stage_seconds)
    assert stats.stage_seconds["synthesis"] > 0 < stats.stage_seconds["sizes"]
    assert stats.peak_memory > 1 << 20
    assert stats.retried == stats.dropped == stats.resumed == 0


def test_candidates_written_here_read_back_elsewhere(tmp_path: Path) -> None:
    """The very same graphs, costs and notes, and the machine that they were ranked for."""
    program = load_program("lora")
    result = search(program, find("sm_90a"), workers=1)
    file = tmp_path / "candidates.json"
    write_candidates(file, result, "sm_90a")
    again = read_candidates(file)
    assert again.machine == "sm_90a"
    assert again.program is again.candidates[0].graph
    assert [c.graph.outputs for c in again.candidates] == [
        c.graph.outputs for c in result.candidates
    ]
    assert [to_text(c.graph) for c in again.candidates] == [
        to_text(c.graph) for c in result.candidates
    ]
    assert [(c.seconds, c.launches, c.note) for c in again.candidates] == [
        (c.cost.seconds, c.cost.launches, c.note) for c in result.candidates
    ]


@pytest.mark.parametrize("text", ["", "{}", '{"format": "obelisk-candidates", "version": 7}'])
def test_a_damaged_candidate_file_is_refused(tmp_path: Path, text: str) -> None:
    """With its name."""
    file = tmp_path / "bad.json"
    file.write_text(text)
    with pytest.raises(ParseError, match=r"bad\.json"):
        read_candidates(file)


class _Dropped:
    """Presses Ctrl-C where Python drops what it raises: in a weak reference's callback."""

    def __init__(self) -> None:
        self.pressed = 0

    def update(self, stage: str, counts: Mapping[str, float | int | str]) -> None:
        """Press once, in the middle of the work."""
        if counts["states"] and not self.pressed:
            self.pressed += 1
            node = _Dying()
            kept = weakref.ref(node, lambda _: signal.raise_signal(signal.SIGINT))
            del node
            assert kept() is None


class _Dying:
    pass


@pytest.mark.alone
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("workers", [1, 2])
def test_a_signal_that_python_drops_is_heard_all_the_same(
    monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """Interned nodes are weakly held: a search is often in such a callback."""
    monkeypatch.setattr(driver, "REPORT_SECONDS", 0.0)
    monkeypatch.setattr(units, "TICK_SECONDS", 0.0)
    listener = _Dropped()
    program = load_program("qknorm_k")
    before = signal.getsignal(signal.SIGINT)
    result = search(program, CPU, workers=workers, progress=listener, budget=Budget(seconds=60))
    assert listener.pressed == 1
    assert result.stats.stopped == "interrupted"
    assert result.stats.seconds < 30
    assert result.candidates[0].graph is program
    assert signal.getsignal(signal.SIGINT) is before


def test_interrupts_are_counted_in_the_main_thread_alone() -> None:
    """Elsewhere, and where SIGINT is ignored, nothing is touched; each still does what it did."""
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        with Interrupts() as outer, Interrupts() as inner:
            signal.raise_signal(signal.SIGINT)
            threading.Thread(target=lambda: Interrupts().__enter__()).start()
            signal.raise_signal(signal.SIGINT)
        assert (outer.count, inner.count, len(heard)) == (2, 2, 2)
        signal.raise_signal(signal.SIGINT)
        assert (outer.count, len(heard)) == (2, 3)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with Interrupts() as ignored:
            signal.raise_signal(signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert ignored.count == 0
    finally:
        signal.signal(signal.SIGINT, before)
