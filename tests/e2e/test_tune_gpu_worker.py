"""The device's worker, on a driver of host memory: what each bad kernel is called, and that tuning
goes on. `test_tune_cuda.py` has the same faults in real kernels, where there is a GPU.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests import fake_cuda

from obelisk.base.errors import ParseError
from obelisk.build.device import COUNTER_BYTES, load_bundle, write_bundle
from obelisk.ir import Graph, KernelGraph
from obelisk.lower.cuda import CudaKernel, CudaLaunch, CudaModule, Place, Pointer
from obelisk.tune import Rig, Status, TuneItem, tune

RIG = Rig("tests.fake_cuda", 0, 0.0, 0.0, 2e-4)
SCRATCH = 256
FAULTS = {
    "half": (Status.INCOMPLETE, "3072 of 6144 elements were not written"),
    "beyond": (Status.OVERRUN, "after its end"),
    "spoils": (Status.OVERRUN, "input 0: it was changed, first at byte 12"),
    "counting": (Status.STALE, "right in a fresh process"),
    "behind": (Status.OVERRUN, "scratch area"),
    "wavering": (Status.STALE, "of 128 calls on the same inputs gave other bits"),
    "fault": (Status.CRASH, "CUDA_ERROR_ILLEGAL_ADDRESS"),
    "hang": (Status.HANG, "no answer within"),
}


def program() -> Graph:
    """y = 2 x + 1."""
    g = KernelGraph("line")
    x = g.input((fake_cuda.ROWS, fake_cuda.COLUMNS), "f32", name="x")
    g.output(x * 2.0 + 1.0, name="y")
    return g.freeze()


def module() -> CudaModule:
    """One launch with an input, an output, scratch memory and a counter."""
    kernel = CudaKernel("obelisk_kernel", "", 1, 32, 0)
    places = (Place.INPUT, Place.OUTPUT, Place.SCRATCH, Place.COUNTER)
    launch = CudaLaunch(0, tuple(Pointer(p, 0, 0) for p in places), "line")
    return CudaModule((kernel,), (launch,), SCRATCH, 1, "m", ())


def item(folder: Path, act: str) -> TuneItem:
    """A candidate whose kernel does what `act` says."""
    cubin = folder / f"{act}.cubin"
    cubin.write_text(json.dumps({"act": act}))
    path = write_bundle(module(), [cubin], folder)
    return TuneItem(act, program(), path, SCRATCH + COUNTER_BYTES)


def test_each_fault_has_its_name_and_the_good_win(tmp_path: Path) -> None:
    """Eight faults between two right kernels: all are named, none ends the run, the faster wins."""
    acts = ["slow", *FAULTS, "right"]
    items = [item(tmp_path, a) for a in acts]
    report = tune(program(), items, rig=RIG, budget_seconds=40.0, limit_seconds=1.0)
    for act, found in zip(acts, report.items, strict=True):
        status, words = FAULTS.get(act, (Status.OK, ""))
        assert found.status is status, found
        assert words in found.detail
    assert report.winner == len(acts) - 1
    assert report.cache_state == "rotated"
    assert report.copies == 64
    assert report.bandwidth is not None
    best = report.items[-1]
    assert best.rounds >= 7
    assert best.seconds is not None
    assert report.items[0].seconds is not None
    assert best.seconds < report.items[0].seconds


def test_more_items_join_once_times_are_known(tmp_path: Path) -> None:
    """`grow` sees who was right and how fast, and what it adds is checked like the rest."""
    seen: list[list[float | None]] = []

    def grow(seconds: Sequence[float | None]) -> list[TuneItem]:
        seen.append(list(seconds))
        return [item(tmp_path, "off"), item(tmp_path, "right")]

    items = [item(tmp_path, "slow"), item(tmp_path, "fault")]
    report = tune(program(), items, rig=RIG, budget_seconds=20.0, grow=grow)
    assert len(seen) == 1
    assert seen[0][0] is not None
    assert seen[0][1] is None
    statuses = [m.status for m in report.items]
    assert statuses == [Status.OK, Status.CRASH, Status.WRONG, Status.OK]
    assert report.winner == 3


def test_the_race_is_held_however_long_the_rest_took(tmp_path: Path) -> None:
    """Checks and builds that use the whole budget up cost no candidate its race."""
    rig = Rig("tests.fake_cuda", 0, 0.0, 0.0, 2e-4, least_race=5.0)

    def grow(seconds: Sequence[float | None]) -> list[TuneItem]:
        time.sleep(3.0)
        return []

    items = [item(tmp_path, "slow"), item(tmp_path, "right")]
    report = tune(program(), items, rig=rig, budget_seconds=3.0, grow=grow)
    assert report.winner == 1
    assert min(m.rounds for m in report.items) >= 1
    assert report.items[0].ratio is not None


def test_a_kernel_that_does_not_load_is_unloadable(tmp_path: Path) -> None:
    """A damaged cubin, and a bundle that is none: refused by name, the context lives on."""
    broken = item(tmp_path, "half")
    (tmp_path / "half.cubin").write_bytes(b"\x7fELF")
    (tmp_path / "none.json").write_text("{}")
    nothing = TuneItem("nothing", program(), tmp_path / "none.json", 4)
    report = tune(
        program(), [item(tmp_path, "right"), broken, nothing], rig=RIG, budget_seconds=10.0
    )
    assert [m.status for m in report.items] == [
        Status.OK, Status.UNLOADABLE, Status.UNLOADABLE,
    ]  # fmt: skip
    assert "loading a cubin failed" in report.items[1].detail
    assert "does not read as a bundle" in report.items[2].detail


def test_bundles_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches, kernels and counters survive; another version is refused."""
    fake_cuda.install(lambda name, made: monkeypatch.setitem(__import__("sys").modules, name, made))
    found = load_bundle(item(tmp_path, "right").library)
    assert found.module == module()
    assert found.scratch_bytes == SCRATCH + COUNTER_BYTES
    data = json.loads(item(tmp_path, "right").library.read_text())
    (tmp_path / "new.json").write_text(json.dumps({**data, "bundle": 99}))
    with pytest.raises(ParseError, match="bundle version 99"):
        load_bundle(tmp_path / "new.json")


def test_a_baseline_waits_for_what_is_imported_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's circular imports, looked at from a second thread, are modules half made: a baseline
    was once lost by that ("partially initialized module").
    """
    from obelisk.tune.gpu_worker import GpuWorker

    seen: list[bool] = []

    class Module:
        @staticmethod
        def factory(setup: object) -> list[object]:
            seen.append(worker.ahead.is_alive())
            return []

    worker = object.__new__(GpuWorker)
    worker.ahead = threading.Thread(target=time.sleep, args=(0.5,))
    worker.copies, worker.inputs, worker.threads = [], [], 1
    worker.baselines, worker.replays = {}, {}
    monkeypatch.setattr(GpuWorker, "_recorded", lambda self, calls: None)
    monkeypatch.setitem(sys.modules, "half_made", Module)
    worker.ahead.start()
    worker.do_prepare(0, "half_made:factory", {})
    assert seen == [False]
