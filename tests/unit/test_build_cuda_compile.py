"""Cubins without a GPU: every architecture, resources from the log, the cache, and failures.

Needs NVRTC or nvcc; skipped loudly where there is neither.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cuda_graphs import fused

from obelisk.app.loading import load_program
from obelisk.base.errors import BuildFailed, MissingDependency
from obelisk.build.cuda import (
    ARCHITECTURES,
    LARGE,
    Cubin,
    Resources,
    compile_cuda,
    compile_cuda_many,
    parse_resources,
    toolchain,
)
from obelisk.lower.cuda import CudaOptions, lower_cuda
from obelisk.machine import Machine, find

MACHINES = [find(n) for n in ("a100", "rtx3090", "rtx4090", "h200", "b200", "rtx5090")]
DEADLY = """extern "C" __global__ void k(int *p) {
  __shared__ unsigned long long b;
  const unsigned at = (unsigned)__cvta_generic_to_shared(&b);
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at), "r"(0));
  *p = 1;
}
"""  # a count of 0: the assembler of NVRTC 13.0 dies of it, for sm_90 and later
PROGRAMS = ("gqa", "mha", "mqa", "qknorm", "rmsnorm", "lora", "gated_mlp", "ntrans", "moe")
SMALL = 'extern "C" __global__ void k(float *p) { p[threadIdx.x] = 1.0f; }\n'

try:
    toolchain()
except MissingDependency as missing:
    pytest.skip(f"no CUDA compiler here: {missing}", allow_module_level=True)


@pytest.fixture(params=["nvrtc", "nvcc"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each of the two compilers; skipped where it is not here. All other tests take NVRTC."""
    if request.param == "nvcc":
        if shutil.which("nvcc") is None:
            pytest.skip("nvcc is not here")
        monkeypatch.setitem(sys.modules, "cuda.bindings", None)
        toolchain.cache_clear()
    elif not toolchain().startswith("nvrtc"):
        pytest.skip("NVRTC is not here")
    yield
    toolchain.cache_clear()


def check(sources: dict[str, tuple[int, int]], machine: Machine) -> None:
    """Compile texts (with threads and shared bytes) and hold them against the machine."""
    for source, built in zip(sources, compile_cuda_many(list(sources), machine.arch), strict=True):
        assert isinstance(built, Cubin), f"{built} {getattr(built, 'log', '')}"
        threads, shared = sources[source]
        r = built.resources
        assert r.registers <= machine.registers_per_thread
        assert r.registers * threads <= machine.registers
        assert shared + r.shared <= machine.shared_bytes
        assert r.spill_stores <= 64, f"{r} {source[:200]}"
        assert built.path.stat().st_size > 0


def test_the_machines_are_the_architectures() -> None:
    assert tuple(m.arch for m in MACHINES) == ARCHITECTURES


@pytest.mark.parametrize("machine", MACHINES, ids=lambda m: m.arch)
def test_fused_kernels_compile_within_limits(machine: Machine) -> None:
    sources: dict[str, tuple[int, int]] = {}
    tall = CudaOptions(row_tile=64, bulk=True)
    picked = (
        ("attention norm", CudaOptions()), ("attention norm", tall), ("gated odd", CudaOptions()),
        ("norm matmul split", CudaOptions(column_tile=64, bulk=True)),
    )  # fmt: skip
    graphs = fused()
    for name, options in picked:
        for kernel in lower_cuda(graphs[name], machine, options).kernels:
            sources[kernel.source] = (kernel.threads, kernel.shared)
    check(sources, machine)


@pytest.mark.usefixtures("either")
def test_both_compilers_build_a_fused_kernel() -> None:
    machine = find("h200")
    kernels = lower_cuda(fused()["attention norm"], machine).kernels
    check({k.source: (k.threads, k.shared) for k in kernels}, machine)


@pytest.mark.parametrize("machine", MACHINES, ids=lambda m: m.arch)
def test_overlapped_iterations_spill_nothing(machine: Machine) -> None:
    graphs = fused()
    picked = (
        ("attention many keys", CudaOptions(groups=3, ahead=True)),
        ("attention many keys", CudaOptions(groups=2, bulk=False, ahead=True)),
        ("attention many keys", CudaOptions(row_warps=8, groups=2, wgmma=False, ahead=True)),
        ("attention many keys norm", CudaOptions(groups=2, ahead=True)),
        ("attention many keys short", CudaOptions(groups=4, ahead=True)),
        ("attention many keys short", CudaOptions(groups=1, ahead=True)),
    )
    sources = [
        kernel.source
        for name, options in picked
        for kernel in lower_cuda(graphs[name], machine, options).kernels
    ]
    assert any("const int following" in s for s in sources)
    for built in compile_cuda_many(sources, machine.arch):
        assert isinstance(built, Cubin), str(built)
        assert built.resources.spill_stores == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("machine", MACHINES, ids=lambda m: m.arch)
def test_every_kernel_of_the_named_programs_compiles_within_limits(machine: Machine) -> None:
    sources: dict[str, tuple[int, int]] = {}
    for name in PROGRAMS:
        for kernel in lower_cuda(load_program(name, batch=1, dtype="f16"), machine).kernels:
            sources[kernel.source] = (kernel.threads, kernel.shared)
    check(sources, machine)


@pytest.mark.usefixtures("either")
def test_a_cubin_is_built_once(tmp_path: Path) -> None:
    first = compile_cuda(SMALL, "sm_90a", directory=tmp_path)
    again = compile_cuda(SMALL, "sm_90a", directory=tmp_path)
    other = compile_cuda(SMALL, "sm_80", directory=tmp_path)
    assert not first.reused
    assert again.reused
    assert again.path == first.path
    assert again.resources == first.resources
    assert other.path != first.path


@pytest.mark.usefixtures("either")
def test_equal_texts_are_compiled_once_and_failures_end_nothing(tmp_path: Path) -> None:
    bad = SMALL.replace("1.0f", "nonsense")
    answers = compile_cuda_many([SMALL, bad, SMALL], "sm_80", directory=tmp_path)
    assert answers[0] is answers[2]
    assert isinstance(answers[0], Cubin)
    assert isinstance(answers[1], BuildFailed)
    assert "nonsense" in answers[1].reason
    assert "nonsense" in Path(answers[1].log).read_text()


def test_a_long_text_is_compiled_apart_and_may_end_its_compiler(tmp_path: Path) -> None:
    """NVRTC in a child process: the same answers; its death and its taking too long are answers."""
    if not toolchain().startswith("nvrtc"):
        pytest.skip("NVRTC is not here")
    padding = "// " + "x" * LARGE + "\n"
    good = compile_cuda(SMALL + padding, "sm_90a", directory=tmp_path)
    plain = compile_cuda(SMALL, "sm_90a", directory=tmp_path)
    assert good.resources == plain.resources
    with pytest.raises(BuildFailed, match="nonsense") as wrong:
        compile_cuda(SMALL.replace("1.0f", "nonsense") + padding, "sm_90a", directory=tmp_path)
    assert "nonsense" in Path(wrong.value.log).read_text()
    with pytest.raises(BuildFailed, match=r"exceeded its 0\.01 s"):
        compile_cuda(SMALL + padding, "sm_80", directory=tmp_path, timeout=0.01)
    if toolchain() == "nvrtc 13.0":  # a later one may compile it
        with pytest.raises(BuildFailed, match="ended by signal 11"):
            compile_cuda(DEADLY + padding, "sm_90a", directory=tmp_path)


@pytest.mark.usefixtures("either")
def test_a_damaged_entry_is_built_again(tmp_path: Path) -> None:
    first = compile_cuda(SMALL, "sm_80", directory=tmp_path)
    (first.path.parent / "resources.json").write_text("{")
    again = compile_cuda(SMALL, "sm_80", directory=tmp_path)
    assert not again.reused
    assert again.resources == first.resources


def test_resources_are_read_from_the_log() -> None:
    log = (
        "ptxas info    : Compiling entry function 'k' for 'sm_90a'\n"
        "ptxas         .     16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads\n"
        "ptxas info    : Used 40 registers, used 1 barriers, 2048 bytes smem, 360 bytes cmem[0]\n"
    )
    assert parse_resources(log) == Resources(40, 16, 12, 8, 2048)
    with pytest.raises(BuildFailed, match="names no registers"):
        parse_resources("nothing")
