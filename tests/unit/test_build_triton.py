"""Triton's compiler without a GPU: every architecture, the cache, failures, limits and hangs.

Skipped loudly where Triton is not installed.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tests.cuda_graphs import fused, gated

from obelisk.app.loading import load_program
from obelisk.base.errors import BuildFailed, Infeasible, InternalError, MissingDependency
from obelisk.build import triton as build_triton
from obelisk.build.triton import TritonCubin, compile_triton_many, launchable, version
from obelisk.ir import DType, KernelGraph
from obelisk.lower.cuda import Place
from obelisk.lower.triton import TritonKernel, TritonModule, lower_triton
from obelisk.machine import Machine, find

MACHINES = [find(n) for n in ("a100", "rtx3090", "rtx4090", "h200", "b200", "rtx5090")]
H200 = find("h200")
PROGRAMS = ("gqa", "mha", "mqa", "qknorm", "rmsnorm", "lora", "gated_mlp", "ntrans", "moe")

try:
    version()
except MissingDependency as missing:
    pytest.skip(f"NOT RUN: {missing}", allow_module_level=True)

PLAIN = """import triton
import triton.language as tl


@triton.jit
def plain(y0, EARLY: tl.constexpr = False):
    i = tl.arange(0, 128)
    tl.store(y0 + i, i * 1.0)
"""


def kernel_of(source: str) -> TritonKernel:
    return TritonKernel("plain", source, 1, (DType.F32,), (True,), 4, 1)


def mixed() -> TritonModule:
    """A graph with f8, bf16 and bool tensors, whose types some architectures lack."""
    g = KernelGraph("mixed")
    x, w = g.input((24, 77), "f8e4m3"), g.input((77, 20), "f8e4m3")
    b, m = g.input((24, 20), "bf16"), g.input((24, 20), "bool")
    g.output(g.matmul(x, w), g.where(m, b, 0.0))
    return lower_triton(g.freeze(), H200)


def check(kernels: Sequence[TritonKernel], machine: Machine, folder: Path) -> None:
    """Compile kernels and hold them against the machine."""
    for kernel, built in zip(
        kernels, compile_triton_many(kernels, machine, directory=folder), strict=True
    ):
        assert isinstance(built, TritonCubin), f"{built} {built.log} {kernel.source}"
        assert built.shared <= machine.shared_bytes
        assert built.threads == 32 * kernel.warps
        assert 0 < built.resources.registers <= machine.registers_per_thread
        assert built.resources.registers * built.threads <= machine.registers
        assert built.resources.stack <= 64, kernel.notes
        assert built.path.read_bytes()[:4] == b"\x7fELF"


@pytest.mark.parametrize("machine", MACHINES, ids=lambda m: m.arch)
def test_kernels_compile_for_every_architecture(machine: Machine, tmp_path: Path) -> None:
    graphs = fused()
    fold = lower_triton(graphs["attention norm"], machine).kernels[0]
    check([fold, *mixed().kernels], machine, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("machine", MACHINES, ids=lambda m: m.arch)
def test_every_kernel_of_the_named_programs_compiles(machine: Machine, tmp_path: Path) -> None:
    kernels = [
        k
        for name in PROGRAMS
        for k in lower_triton(load_program(name, batch=1, dtype="f16"), machine).kernels
    ]
    check(kernels, machine, tmp_path)


def test_a_cubin_is_built_once(tmp_path: Path) -> None:
    kernel = kernel_of(PLAIN)
    first, twin = compile_triton_many([kernel, kernel], H200, directory=tmp_path)
    assert isinstance(first, TritonCubin)
    assert twin is first
    (again,) = compile_triton_many([kernel], H200, directory=tmp_path)
    (other,) = compile_triton_many([replace(kernel, warps=8)], H200, directory=tmp_path)
    assert isinstance(again, TritonCubin)
    assert isinstance(other, TritonCubin)
    assert again == replace(first, seconds=0.0, reused=True)
    assert other.path != first.path
    assert other.threads == 256
    (first.path.parent / "facts.json").write_text("{")
    (mended,) = compile_triton_many([kernel], H200, directory=tmp_path)
    assert isinstance(mended, TritonCubin)
    assert not mended.reused


def test_failures_name_reason_and_log_and_end_nothing(tmp_path: Path) -> None:
    """A text that is wrong, one that ends the process, one that never ends: each is one failure."""
    wrong = kernel_of(PLAIN.replace("tl.arange(0, 128)", "tl.arange(0, 100)"))
    deadly = kernel_of(PLAIN.replace("@triton.jit", "import os\nos._exit(3)\n@triton.jit"))
    endless = kernel_of(PLAIN.replace("@triton.jit", "while True: pass\n@triton.jit"))
    kernels = [wrong, deadly, endless, kernel_of(PLAIN)]
    answers = compile_triton_many(kernels, H200, workers=1, timeout=3.0, directory=tmp_path)
    reasons = [a.reason for a in answers if isinstance(a, BuildFailed)]
    assert len(reasons) == 3
    assert "power of 2" in reasons[0]
    assert "exit code 3" in reasons[1]
    assert "exceeded its 3 s" in reasons[2]
    for kernel, answer in zip(kernels, answers[:3], strict=False):
        assert isinstance(answer, BuildFailed)
        assert kernel.source in Path(answer.log).read_text()
    assert isinstance(answers[3], TritonCubin)
    assert not [p for p in tmp_path.rglob(".*")], "a half-made build was left behind"


def test_shared_memory_that_does_not_fit_is_named(tmp_path: Path) -> None:
    """Fewer stages are tried first; what does not fit with one is refused."""
    small = replace(H200, name="small", shared_bytes=40_000)
    (kernel,) = lower_triton(gated(64, 256, 128, parts=1, loop=4), H200).kernels
    assert kernel.stages > 1
    (built,) = compile_triton_many([kernel], small, directory=tmp_path)
    assert isinstance(built, TritonCubin)
    assert built.shared <= 40_000
    tiny = replace(H200, name="tiny", shared_bytes=1000)
    (refused,) = compile_triton_many([kernel], tiny, directory=tmp_path)
    assert isinstance(refused, BuildFailed)
    assert "tiny has 1000" in refused.reason


def test_a_machine_without_cuda_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BuildFailed, match="no CUDA device"):
        compile_triton_many([kernel_of(PLAIN)], replace(H200, capability=None), directory=tmp_path)


def test_launches_pass_the_compilers_own_pointers(tmp_path: Path) -> None:
    """Every launch has two arguments more than the text, as the cubin's parameters have."""
    module = lower_triton(fused()["attention split"], H200)
    built = compile_triton_many(module.kernels, H200, directory=tmp_path)
    assert all(isinstance(b, TritonCubin) for b in built)
    whole = launchable(module, [b for b in built if isinstance(b, TritonCubin)])
    for launch, text in zip(whole.launches, module.launches, strict=True):
        assert launch.arguments[:-2] == text.arguments
        assert [p.place for p in launch.arguments[-2:]] == [Place.SCRATCH] * 2
        assert whole.kernels[launch.kernel].entry == "obelisk_kernel"
    assert whole.counters == 0
    with pytest.raises(InternalError, match="0 cubins for 2 kernels"):
        launchable(module, [])


def test_without_triton_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise build_triton.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(build_triton.importlib.metadata, "version", absent)
    with pytest.raises(MissingDependency, match=r"obelisk\[triton\]"):
        version()


def test_importing_the_back_end_imports_no_triton() -> None:
    code = "import sys, obelisk.build.triton, obelisk.lower.triton; print('triton' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "False"


def test_infeasible_is_no_build_failure() -> None:
    with pytest.raises(Infeasible):
        lower_triton(load_program("gqa", 1, "f16"), find("host"))
