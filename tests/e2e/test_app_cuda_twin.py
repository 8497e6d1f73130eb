"""`optimize(device="cuda")` without a GPU: every stage is the real one but the compiler's output
and the driver, which is one of host memory (`fake_cuda`). What needs real kernels is in
`test_app_cuda.py`.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests import fake_cuda

import obelisk as ob
from obelisk.app import backend_cuda, backend_gpu
from obelisk.app.backends import backend_of
from obelisk.app.calls import Bound
from obelisk.app.cuda_calls import REMEMBERED, _Loaded
from obelisk.app.pipeline import optimize_given
from obelisk.app.profiling import profile
from obelisk.app.request import Wanted
from obelisk.base.errors import BuildFailed, CallError, UserError
from obelisk.build.cuda import Cubin, Resources
from obelisk.build.device import CudaLibrary
from obelisk.ir import Graph, KernelGraph
from obelisk.lower.cuda import CudaKernel, CudaLaunch, CudaModule, Place, Pointer
from obelisk.search import Budget, read_candidates, search, write_candidates
from obelisk.tune import Rig

pytestmark = pytest.mark.usefixtures("fresh_cache")


def program() -> Graph:
    """y = x^2: one kernel, however it is lowered."""
    g = KernelGraph("squares")
    g.output(g.square(g.input((fake_cuda.ROWS, fake_cuda.COLUMNS), "f32", name="x")), name="y")
    return g.freeze()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Counter[str]:
    """A device whose kernels all square; gives how often each text was compiled."""
    fake_cuda.install(lambda name, made: monkeypatch.setitem(sys.modules, name, made))
    counts: Counter[str] = Counter()

    def compile_cuda(source: str, arch: str, *, timeout: float) -> Cubin:
        counts[source] += 1
        head = re.search(r"obelisk_kernel\(([^)]*)\)", source)
        assert head is not None
        path = tmp_path / f"{len(counts)}.cubin"
        told = {"act": "squares", "arguments": len(head[1].split(","))}
        path.write_text(json.dumps(told))
        return Cubin(path, 0.1, Resources(32, 0, 0, 0, 0), False)

    monkeypatch.setattr(backend_cuda, "compile_cuda", compile_cuda)
    monkeypatch.setattr(backend_cuda, "toolchain", lambda: "a compiler 1.0")
    monkeypatch.setattr(backend_gpu, "has_triton", lambda: False)  # its cubins would be real ones
    rig = Rig("tests.fake_cuda", 0, 0.0, 0.0, 2e-4)
    monkeypatch.setattr(backend_cuda.CudaBackend, "rig", lambda self, device: rig)
    return counts


def test_optimize_from_end_to_end(compiled: Counter[str], tmp_path: Path) -> None:
    """Machine, search, judges, lowering, builds, tuning, answer: all of the device; no text is
    compiled twice; the second time the cache answers; an export reads back.
    """
    best = ob.optimize(program(), device="cuda", budget=6.0, baselines=())
    report = best.report
    assert report.device == "h200"
    assert report.environment["device"] == "NVIDIA H200"
    assert report.environment["compiler"] == "a compiler 1.0"
    assert report.chosen.status == "ok"
    assert report.chosen.kernels == 1
    assert report.floor_us is not None
    assert best.verdict.accepted
    assert max(compiled.values()) == 1
    (note,) = [n for n in report.notes if "kernels compiled in" in n]
    assert note.startswith(f"{len(compiled)} kernels")
    assert note.endswith("a second")
    assert "__global__" in best.source
    again = ob.optimize(program(), device="cuda", budget=6.0, baselines=())
    assert again.report.cached
    assert again.source == best.source
    assert max(compiled.values()) == 1
    read = ob.load(best.save(tmp_path / "a.obelisk"))
    assert read.artifact == best.artifact
    assert read.artifact.target["arch"] == "sm_90a"
    with pytest.raises(CallError, match="CUDA device"):
        read(np.zeros((fake_cuda.ROWS, fake_cuda.COLUMNS), np.float32))


def test_profile_of_a_device_result(
    compiled: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times, bytes and occupancy of each kernel; counters are missed by name."""
    monkeypatch.setenv("PATH", "")
    best = ob.optimize(program(), device="cuda", budget=6.0, baselines=())
    found = profile(best, "cuda")
    (kernel,) = found.kernels
    size = sum(n.nbytes for n in (*program().inputs, *program().outputs))
    assert kernel.bytes == size
    assert kernel.bandwidth == pytest.approx(size / kernel.time_us * 1e6)
    assert kernel.registers == 64
    assert kernel.occupancy is not None
    assert kernel.occupancy > 0
    assert found.notes == ("no hardware counters: ncu is not on the PATH",)
    assert profile(best, "cuda-c", counters=False).kernels  # the same device by another name
    with pytest.raises(UserError, match="was built for cuda, and --device is cpu"):
        profile(best, "cpu")


def test_candidates_of_another_machine_are_judged_here(
    compiled: Counter[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search's file, tuned where no solver and no prover is installed; another program's file is
    refused.
    """
    graph, machine = program(), backend_of("cuda").machine("cuda")
    file = tmp_path / "c.json"
    write_candidates(file, search(graph, machine, budget=Budget(10.0), workers=1), "h200")
    for name in ("ortools", "egglog", "rustworkx"):
        monkeypatch.setitem(sys.modules, name, None)
    found = read_candidates(file)
    best = optimize_given(found.program, found, Wanted("cuda", 6.0, baselines=()))
    assert best.report.chosen.status == "ok"
    assert any("found for h200" in note for note in best.report.notes)
    assert not best.report.cached
    other = KernelGraph("other")
    other.output(other.exp(other.input((4, 4), name="x")))
    with pytest.raises(UserError, match="candidates are of squares, not of other"):
        optimize_given(other.freeze(), found, Wanted("cuda"))


def test_sizes_that_cannot_be_made_cost_no_run(
    compiled: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault in making siblings is counted; what was found is measured all the same."""

    def broken(*_: object) -> list[Graph]:
        raise ZeroDivisionError("no sizes")

    monkeypatch.setattr(backend_cuda, "neighbours", broken)
    best = ob.optimize(program(), device="cuda", budget=4.0, baselines=(), cache=False)
    assert best.report.chosen.status == "ok"
    assert best.report.failures["sizing failed"] >= 1


class HostTorch:
    """As much of torch as calls need, on host memory."""

    uint8 = "uint8"

    class Memory:
        def __init__(self, size: int) -> None:
            self.data = np.zeros(max(size, 1), np.uint8)

        def data_ptr(self) -> int:
            return int(self.data.ctypes.data)

    class cuda:
        @staticmethod
        def Stream() -> Any:
            return SimpleNamespace(cuda_stream=99)

        @staticmethod
        def synchronize() -> None:
            """Nothing runs behind anybody's back here."""

    @staticmethod
    def empty(size: int, dtype: str, device: str) -> Memory:
        return HostTorch.Memory(size)

    zeros = empty


def test_several_launches_become_one_graph_when_they_come_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """x to the fourth in two launches: every call is right, the second on the same addresses is
    recorded, and what is no longer remembered is freed.
    """
    driver = fake_cuda.install(lambda name, made: monkeypatch.setitem(sys.modules, name, made))
    kernel = CudaKernel("obelisk_kernel", "", 1, 32, 0)
    ends = ((Place.INPUT, Place.SCRATCH), (Place.SCRATCH, Place.OUTPUT))
    launches = tuple(CudaLaunch(0, tuple(Pointer(p, 0, 0) for p in x), "") for x in ends)
    module = CudaModule((kernel,), launches, fake_cuda.COUNT * 4, 1, "m", ())
    library = CudaLibrary(module, [json.dumps({"act": "squares", "arguments": 2}).encode()])
    loaded = _Loaded(HostTorch, library)
    x, y = (np.zeros(fake_cuda.COUNT, np.float32) for _ in range(2))
    bound = Bound([x.ctypes.data], [y.ctypes.data], (), 0)
    for turn in range(4):
        x[:] = np.random.default_rng(turn).standard_normal(fake_cuda.COUNT)
        loaded.run(HostTorch, bound, 7)
        np.testing.assert_allclose(y, x**4, rtol=1e-5)
        (call,) = loaded.calls.values()
        assert (call.graph is None) == (turn == 0)
    freed: list[int] = []
    monkeypatch.setattr(driver, "cuGraphExecDestroy", lambda g: (freed.append(g), (0,))[1])
    others = [np.zeros(fake_cuda.COUNT, np.float32) for _ in range(REMEMBERED)]
    for other in others:
        loaded.run(HostTorch, Bound([x.ctypes.data], [other.ctypes.data], (), 0), 7)
        np.testing.assert_allclose(other, x**4, rtol=1e-5)
    assert len(loaded.calls) == REMEMBERED
    assert len(freed) == 1
    slots = len(loaded.free)
    loaded.record(HostTorch, bound, 7)
    assert len(loaded.free) == slots - 1
    assert len(loaded.scratch) == 1


def test_a_device_that_faults_on_everything_is_said_so(
    compiled: Counter[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When not even the program's own kernels run, the error has the driver's words."""

    def broken(source: str, arch: str, *, timeout: float) -> Cubin:
        path = tmp_path / "f.cubin"
        path.write_text(json.dumps({"act": "fault", "arguments": 2}))
        return Cubin(path, 0.1, Resources(32, 0, 0, 0, 0), False)

    monkeypatch.setattr(backend_cuda, "compile_cuda", broken)
    with pytest.raises(BuildFailed, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        ob.optimize(program(), device="cuda", budget=6.0, baselines=(), cache=False)
