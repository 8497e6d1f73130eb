"""Fault injection (REPORTS R02, R34): real, tiny C libraries that misbehave in one way each.

Proves that each fault gets its own status, that none ends the run or wins however fast it is, and
that the best right candidate is still found, with counts per reason.
"""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from obelisk.base.settings import settings
from obelisk.ir import Graph, KernelGraph
from obelisk.tune import Status, TuneItem, tune

ROWS, COLS = 64, 96
N = ROWS * COLS

# y = 2 x + 1, at three speeds; `work` repeats the whole computation.
RIGHT = """
    for (int w = 0; w < {work}; ++w)
        for (int i = 0; i < n; ++i) {{ y[i] = 2 * x[i] + 1; __asm__ volatile("" ::: "memory"); }}
    return 0;
"""
FAULTS = {
    "returns at once": (Status.INCOMPLETE, "return 0;"),
    "writes half": (
        Status.INCOMPLETE,
        "for (int i = 0; i < n / 2; ++i) y[i] = 2 * x[i] + 1; return 0;",
    ),
    "misses the last element": (
        Status.INCOMPLETE,
        "for (int i = 0; i < n - 1; ++i) y[i] = 2 * x[i] + 1; return 0;",
    ),
    "loops for ever": (Status.HANG, "for (volatile int i = 0;; ++i) {} return 0;"),
    "segfault": (Status.CRASH, "*(volatile int *)16 = 1; return 0;"),
    "abort": (Status.CRASH, "abort(); return 0;"),
    "exit 0": (Status.CRASH, "exit(0); return 0;"),
    "quick exit in a right answer": (
        Status.CRASH,
        "for (int i = 0; i < n; ++i) y[i] = 2 * x[i] + 1; _exit(0); return 0;",
    ),
    "writes behind the output": (
        Status.OVERRUN,
        "for (int i = 0; i < n + 1; ++i) y[i] = 2 * x[i] + 1; return 0;",
    ),
    "writes before the output": (
        Status.OVERRUN,
        "for (int i = -3; i < n; ++i) y[i] = 2 * x[i < 0 ? 0 : i] + 1; return 0;",
    ),
    "writes behind its scratch": (
        Status.OVERRUN,
        "for (int i = 0; i < n; ++i) y[i] = 2 * x[i] + 1; ((char *)scratch)[64] = 7; return 0;",
    ),
    "writes to its input": (
        Status.CRASH,
        "for (int i = 0; i < n; ++i) { y[i] = 2 * x[i] + 1; ((float *)x)[i] = 0; } return 0;",
    ),
    "writes far away": (
        Status.CRASH,
        "for (int i = 0; i < n + 100000; ++i) y[i] = 1; return 0;",
    ),
    "right at the first call only": (
        Status.STALE,
        "static int calls; if (calls++) return 0;"
        " for (int i = 0; i < n; ++i) y[i] = 2 * x[i] + 1; return 0;",
    ),
    "remembers its first input": (
        Status.STALE,
        "static float *kept; if (!kept) { kept = malloc(n * 4); memcpy(kept, x, n * 4); }"
        " for (int i = 0; i < n; ++i) y[i] = 2 * kept[i] + 1; return 0;",
    ),
    "accumulates": (
        Status.STALE,
        "static float sum[1 << 16];"
        " for (int i = 0; i < n; ++i) y[i] = sum[i] += 2 * x[i] + 1; return 0;",
    ),
    "believes its scratch is zero": (
        Status.WRONG,
        "float z; memcpy(&z, scratch, 4);"
        " for (int i = 0; i < n; ++i) y[i] = 2 * x[i] + 1 + z; return 0;",
    ),
    "fast but wrong by 1e-2": (
        Status.WRONG,
        "for (int i = 0; i < n; ++i) y[i] = 2 * x[i] + 1.01f; return 0;",
    ),
    "one element wrong": (
        Status.WRONG,
        "for (int i = 0; i < n; ++i) y[i] = 2 * x[i] + 1; y[n - 1] += 0.01f; return 0;",
    ),
    "one NaN": (
        Status.WRONG,
        "for (int i = 0; i < n; ++i) y[i] = 2 * x[i] + 1; y[7] = 0.0f / (y[7] - y[7]); return 0;",
    ),
    "refuses": (Status.REFUSED, "return 3;"),
}  # fmt: skip


def program() -> Graph:
    """y = 2 x + 1 on a (64, 96) tensor."""
    g = KernelGraph("line")
    x = g.input((ROWS, COLS), "f32", name="x")
    g.output(x * 2.0 + 1.0, name="y")
    return g.freeze()


def compile_library(folder: Path, name: str, body: str) -> Path:
    """One tiny C library whose `obelisk_run` has the given body."""
    stem = name.replace(" ", "_")
    source, library = folder / f"{stem}.c", folder / f"{stem}.so"
    source.write_text(
        "#include <stdlib.h>\n#include <string.h>\n#include <unistd.h>\n"
        "int obelisk_run(void *const *inputs, void *const *outputs, void *scratch, int threads) {\n"
        f"    const int n = {N}; const float *x = inputs[0]; float *y = outputs[0];\n"
        f"    (void)n; (void)x; (void)y; (void)scratch; (void)threads;\n{body}\n}}\n"
    )
    command = [
        settings().compiler,
        "-O1",
        "-w",
        "-shared",
        "-fPIC",
        "-o",
        str(library),
        str(source),
    ]
    subprocess.run(command, check=True, capture_output=True)
    return library


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """All libraries of this module, compiled once."""
    folder = tmp_path_factory.mktemp("libraries")
    bodies = {name: body for name, (_, body) in FAULTS.items()}
    bodies["sleepy"] = "usleep(100000);" + RIGHT.format(work=1)
    bodies |= {f"right x{work}": RIGHT.format(work=work) for work in (1, 3, 20)}
    return {name: compile_library(folder, name, body) for name, body in bodies.items()}


def item(libraries: Mapping[str, Path], name: str) -> TuneItem:
    """An item for a library of this module, with 64 bytes of scratch."""
    return TuneItem(name, program(), libraries[name], 64)


def test_every_fault_has_its_own_status_and_the_best_right_candidate_wins(
    libraries: Mapping[str, Path],
) -> None:
    """Each fault is named with its status; the fastest right candidate wins; the counts add up."""
    names = ["right x20", *FAULTS, "right x1", "right x3"]
    report = tune(
        program(), [item(libraries, n) for n in names], budget_seconds=40, limit_seconds=1.0
    )
    found = {m.name: m.status for m in report.items}
    expected = {name: status for name, (status, _) in FAULTS.items()}
    expected |= {f"right x{w}": Status.OK for w in (1, 3, 20)}
    assert found == expected, {m.name: (m.status, m.detail) for m in report.items}
    assert report.winner is not None
    assert names[report.winner] == "right x1"
    wanted = {s.value: sum(v is s for v in expected.values()) for s in Status}
    assert report.counts == {word: n for word, n in wanted.items() if n}
    for m in report.items:
        assert (m.detail == "") <= (m.status is Status.OK)
        if m.status is not Status.OK:
            assert m.rounds == 0, "nothing wrong is ever raced"


def test_details_name_signal_code_element_and_place(libraries: Mapping[str, Path]) -> None:
    """A person can tell from the detail alone what happened."""
    names = ["segfault", "exit 0", "refuses", "misses the last element", "writes behind the output"]
    report = tune(program(), [item(libraries, n) for n in names], budget_seconds=20)
    detail = {m.name: m.detail for m in report.items}
    assert "SIGSEGV" in detail["segfault"]
    assert "exited with code 0" in detail["exit 0"]
    assert "returned 3" in detail["refuses"]
    assert "1 of 6144 elements" in detail["misses the last element"]
    assert "(63, 95)" in detail["misses the last element"]
    assert "1 after its end" in detail["writes behind the output"]
    assert report.winner is None
    assert report.reason.startswith("no item is right: ")


def test_a_missing_library_a_missing_symbol_and_a_foreign_interface_are_unloadable(
    libraries: Mapping[str, Path], tmp_path: Path
) -> None:
    """What cannot be called is counted, not raised."""
    other = KernelGraph("other")
    other.output(other.input((3, 5), "f32") * 2.0)
    empty = tmp_path / "empty.so"
    (tmp_path / "empty.c").write_text("int nothing;\n")
    command = [settings().compiler, "-shared", "-fPIC", "-o", str(empty), str(tmp_path / "empty.c")]
    subprocess.run(command, check=True)
    report = tune(
        program(),
        [
            TuneItem("missing", program(), tmp_path / "none.so"),
            TuneItem("no symbol", program(), empty),
            TuneItem("foreign", other.freeze(), libraries["right x1"]),
        ],
        budget_seconds=10,
    )
    assert [m.status for m in report.items] == [Status.UNLOADABLE] * 3
    assert "obelisk_run" in report.items[1].detail
    assert "(3, 5)" in report.items[2].detail
    assert "(64, 96)" in report.items[2].detail


def test_the_programs_own_kernels_win_a_tie(libraries: Mapping[str, Path]) -> None:
    """Two equally fast candidates: item 0 is chosen and the report says why."""
    items = [
        TuneItem("own", program(), libraries["right x3"], 64),
        TuneItem("same", program(), libraries["right x3"], 64),
    ]
    report = tune(program(), items, budget_seconds=15)
    assert report.winner == 0
    assert "own kernels" in report.reason


def test_when_nothing_is_faster_the_program_is_the_answer(libraries: Mapping[str, Path]) -> None:
    """R02 (c): own kernels first and fastest, a fake among the rivals; the baseline has a name."""
    names = ["right x1", "right x20", "returns at once"]
    report = tune(program(), [item(libraries, n) for n in names], budget_seconds=15)
    assert report.winner == 0
    assert report.reason == "the program's own kernels are the fastest"
    assert report.speedups == {"right x1": 1.0}
    assert report.counts == {"ok": 2, "incomplete": 1}
    slower = tune(program(), [item(libraries, n) for n in reversed(names[:2])], budget_seconds=15)
    assert slower.winner == 1
    assert slower.speedups["right x20"] > 4
    assert "times as fast as the program's own kernels (right x20)" in slower.reason


def test_the_budget_is_kept(libraries: Mapping[str, Path]) -> None:
    """Checks alone would take 12 s and a full race minutes: a budget of 2 s ends both."""
    items = [item(libraries, "right x20")] + [item(libraries, "sleepy")] * 30
    start = time.monotonic()
    report = tune(program(), items, budget_seconds=2.0)
    assert time.monotonic() - start < 11.0
    assert report.counts["untried"] >= 15
    assert report.winner is not None
    assert report.items[report.winner].status is Status.OK


@pytest.mark.alone
def test_ctrl_c_returns_the_best_so_far_and_leaves_no_process(
    libraries: Mapping[str, Path],
) -> None:
    """An interrupt while a candidate hangs: what was right before is returned."""
    names = ["right x20", "right x1", "loops for ever", "right x3"]
    main = threading.main_thread().ident
    assert main is not None
    interrupt = threading.Timer(1.0, signal.pthread_kill, (main, signal.SIGINT))

    class Listener:
        def update(self, stage: str, counts: Mapping[str, float | int | str]) -> None:
            if counts["done"] == 2:
                interrupt.start()

    start = time.monotonic()
    report = tune(
        program(),
        [item(libraries, n) for n in names],
        budget_seconds=600,
        progress=Listener(),
        limit_seconds=300,
    )
    assert time.monotonic() - start < 60
    assert report.interrupted
    assert [m.status for m in report.items] == [
        Status.OK, Status.OK, Status.UNTRIED, Status.UNTRIED
    ]  # fmt: skip
    assert report.winner == 1
    left = [p for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE]
    assert not [p for p in left if "obelisk.tune.worker" in " ".join(p.cmdline())]
