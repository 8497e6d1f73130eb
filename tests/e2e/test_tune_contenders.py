"""Python baselines beside libraries: checked, timed in the same rounds, and as harmless when bad.

Also the promises of the run as a whole: cache state, threads, progress, and that the worker dies
with its parent.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from obelisk.base.errors import UserError
from obelisk.base.settings import settings
from obelisk.ir import Graph, KernelGraph
from obelisk.machine import host
from obelisk.machine.description import Cache
from obelisk.tune import Contender, Setup, Status, TuneItem, rigs, tune

ROWS, INNER, COLS = 48, 64, 80


def program(rows: int = ROWS) -> Graph:
    """y = x @ w + 1, z = sum of x along rows."""
    g = KernelGraph("product")
    x = g.input((rows, INNER), "f32", name="x")
    w = g.input((INNER, COLS), "f32", name="w")
    g.output(g.matmul(x, w) + 1.0, name="y")
    g.output(g.sum(x, -1), name="z")
    return g.freeze()


LOOPS = """
int obelisk_run(void *const *inputs, void *const *outputs, void *scratch, int threads) {
    const float *x = inputs[0], *w = inputs[1]; float *y = outputs[0], *z = outputs[1];
    if (threads != 2 || ((unsigned long)scratch | (unsigned long)y | (unsigned long)x) % 64)
        return 1;
    for (int i = 0; i < ROWS; ++i) {
        float s = 0;
        for (int k = 0; k < 64; ++k) s += x[i * 64 + k];
        z[i] = s;
        for (int j = 0; j < 80; ++j) {
            float t = 1;
            for (int k = 0; k < 64; ++k) t += x[i * 64 + k] * w[k * 80 + j];
            y[i * 80 + j] = t;
        }
    }
    return 0;
}
"""


def library(folder: Path, rows: int = ROWS) -> Path:
    """The plain loops, built; they insist on 2 threads and 64-byte alignment."""
    out = folder / f"loops{rows}.so"
    command = [settings().compiler, "-O1", "-shared", "-fPIC", f"-DROWS={rows}", "-x", "c", "-"]
    subprocess.run([*command, "-o", str(out)], input=LOOPS.encode(), check=True)
    return out


def right(setup: Setup) -> list[Callable[[], Any]]:
    """numpy."""
    return [
        lambda x=x, w=w: (x @ w + np.float32(1), x.sum(-1, keepdims=True)) for x, w in setup.copies
    ]


def slow(setup: Setup) -> list[Callable[[], Any]]:
    """numpy after a nap."""
    calls = right(setup)
    return [lambda c=c: (time.sleep(0.02), c())[1] for c in calls]


def wrong(setup: Setup) -> list[Callable[[], Any]]:
    """Forgets the one."""
    return [lambda x=x, w=w: (x @ w, x.sum(-1, keepdims=True)) for x, w in setup.copies]


def one_output(setup: Setup) -> list[Callable[[], Any]]:
    """Forgets an output."""
    return [lambda x=x, w=w: x @ w + 1 for x, w in setup.copies]


def other_shape(setup: Setup) -> list[Callable[[], Any]]:
    """Drops the kept axis."""
    return [lambda x=x, w=w: (x @ w + 1, x.sum(-1)) for x, w in setup.copies]


def raising(setup: Setup) -> list[Callable[[], Any]]:
    """Raises when called."""
    return [lambda: setup.payload["no such key"] for _ in setup.copies]


def refusing(setup: Setup) -> list[Callable[[], Any]]:
    """Raises when prepared, with its payload in the text."""
    raise RuntimeError(f"not today: {setup.payload}, {setup.threads} threads")


def too_few(setup: Setup) -> list[Callable[[], Any]]:
    """Gives no callable."""
    return []


def killing(setup: Setup) -> list[Callable[[], Any]]:
    """Ends its process when called."""
    return [lambda: os.kill(os.getpid(), signal.SIGKILL) for _ in setup.copies]


def hanging(setup: Setup) -> list[Callable[[], Any]]:
    """Never gets ready."""
    time.sleep(1000)
    return []


def torch_product(setup: Setup) -> list[Callable[[], Any]]:
    """torch, eagerly."""
    import torch

    torch.set_num_threads(setup.threads)
    tensors = [[torch.from_numpy(a) for a in copy] for copy in setup.copies]
    return [lambda x=x, w=w: (x @ w + 1, x.sum(-1, keepdim=True)) for x, w in tensors]


BAD: dict[str, tuple[Contender, Status, str]] = {
    "wrong": (Contender("wrong", wrong), Status.WRONG, "output 'y'"),
    "one output": (Contender("one output", one_output), Status.REFUSED, "1 outputs, expected 2"),
    "other shape": (Contender("other shape", other_shape), Status.REFUSED, "expected (48, 1)"),
    "raising": (Contender("raising", raising, {}), Status.REFUSED, "KeyError"),
    "refusing": (
        Contender("refusing", refusing, ["p"]), Status.UNLOADABLE, "not today: ['p'], 2 threads"
    ),
    "too few": (Contender("too few", too_few), Status.UNLOADABLE, "0 callables for 1 copies"),
    "absent": (Contender("absent", "no.such:module"), Status.UNLOADABLE, "No module named 'no'"),
    "killing": (Contender("killing", killing), Status.CRASH, "SIGKILL"),
    "hanging": (Contender("hanging", hanging, None, 1.0), Status.HANG, "1 s"),
}  # fmt: skip


def test_baselines_and_libraries_race_in_the_same_rounds(tmp_path: Path) -> None:
    """Good ones are checked and timed; bad ones get their status and disturb nobody."""
    seen: list[tuple[str, Mapping[str, float | int | str]]] = []

    class Listener:
        def update(self, stage: str, counts: Mapping[str, float | int | str]) -> None:
            seen.append((stage, dict(counts)))

    others = [c for c, _, _ in BAD.values()]
    report = tune(
        program(),
        [TuneItem("loops", program(), library(tmp_path))],
        contenders=[*others, Contender("numpy", right), Contender("slow", slow)],
        budget_seconds=20,
        threads=2,
        progress=Listener(),
    )
    found = {m.name: m for m in report.contenders}
    for name, (_, status, text) in BAD.items():
        assert (found[name].status, text in found[name].detail) == (status, True), found[name]
        assert found[name].rounds == 0
    assert report.winner == 0, report.items
    (loops,) = report.items
    assert min(loops.rounds, found["numpy"].rounds, found["slow"].rounds) >= 14
    assert found["numpy"].error is not None
    assert found["numpy"].error < 1
    for m in (loops, found["numpy"], found["slow"]):
        assert m.seconds is not None
        assert m.low is not None
        assert m.high is not None
        assert 0 < m.low <= m.seconds <= m.high
        assert m.calls >= m.rounds
    assert report.speedups["slow"] > 10
    assert report.speedups["loops"] == 1.0
    assert "wrong" not in report.speedups
    assert (report.cache_state, report.copies) == ("resident", 1)
    assert {"tune", "race"} <= {stage for stage, _ in seen}
    data = report.to_json()
    assert data["items"][0]["status"] == "ok"
    assert data["counts"] == {"ok": 1}


def test_baselines_alone_can_be_timed() -> None:
    """No item: no winner, but the numbers are there."""
    report = tune(program(), [], contenders=[Contender("numpy", right)], budget_seconds=5)
    assert report.winner is None
    assert report.contenders[0].status is Status.OK
    assert report.contenders[0].rounds > 0


def test_torch_beside_a_library(tmp_path: Path) -> None:
    """torch tensors are taken as outputs."""
    pytest.importorskip("torch", reason="torch is not installed: the torch baseline is NOT tested")
    report = tune(
        program(),
        [TuneItem("loops", program(), library(tmp_path))],
        contenders=[Contender("torch", torch_product)],
        budget_seconds=10,
        threads=2,
    )
    assert report.contenders[0].status is Status.OK, report.contenders[0]
    assert report.contenders[0].rounds > 0


def test_large_inputs_are_rotated_beyond_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streamed: as many copies as span four caches, with different contents, all judged."""
    small = replace(host(), caches=(Cache(3, 32 * 1024, 2, 1e9),))
    monkeypatch.setattr(rigs, "host", lambda: small)
    report = tune(
        program(),
        [TuneItem("loops", program(), library(tmp_path))],
        contenders=[Contender("numpy", right), Contender("wrong", wrong)],
        budget_seconds=5,
        threads=2,
    )
    bytes_of_inputs = 4 * (ROWS * INNER + INNER * COLS)
    assert report.cache_state == "streamed"
    assert report.copies == -(-4 * 32 * 1024 // bytes_of_inputs)
    assert [m.status for m in (*report.items, *report.contenders)] == [
        Status.OK, Status.OK, Status.WRONG
    ]  # fmt: skip


def test_functions_that_cannot_be_imported_are_refused_at_once() -> None:
    """Before any process is started."""
    with pytest.raises(UserError, match="top level"):
        tune(program(), [], contenders=[Contender("x", lambda setup: [])], budget_seconds=1)
    with pytest.raises(UserError, match="module:function"):
        tune(program(), [], contenders=[Contender("x", "numpy.add")], budget_seconds=1)
    with pytest.raises(UserError, match="positive"):
        tune(program(), [], budget_seconds=0)


PARENT = """
import sys
from pathlib import Path
sys.path.insert(0, {folder!r})
from {module} import program
from obelisk.tune import TuneItem, tune
tune(program(), [TuneItem("hang", program(), Path({library!r}))], budget_seconds=100,
     limit_seconds=100)
"""


def test_the_worker_dies_with_its_parent(tmp_path: Path) -> None:
    """SIGKILL of the tuning process while a candidate hangs: no process is left behind."""
    hang = tmp_path / "hang.so"
    source = b"int obelisk_run(void *const *i, void *const *o, void *s, int t) { for (;;) {} }"
    command = [settings().compiler, "-O0", "-shared", "-fPIC", "-x", "c", "-", "-o", str(hang)]
    subprocess.run(command, input=source, check=True)
    here = Path(__file__)
    code = PARENT.format(folder=str(here.parent), module=here.stem, library=str(hang))
    parent = subprocess.Popen([sys.executable, "-c", code])
    try:
        end = time.monotonic() + 30
        children: list[psutil.Process] = []
        while not children and time.monotonic() < end:
            time.sleep(0.1)
            children = psutil.Process(parent.pid).children()
        (worker,) = children
        while worker.cpu_times().user < 1.0 and time.monotonic() < end:
            time.sleep(0.1)  # until it surely is inside the endless loop
    finally:
        parent.kill()
        parent.wait()
    gone, alive = psutil.wait_procs([worker], timeout=5)
    assert gone
    assert not alive
