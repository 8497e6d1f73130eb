"""On a GPU: kernels that fault, hang or are wrong are named, and tuning goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from obelisk.base.errors import ObeliskError
from obelisk.build.cuda import compile_cuda
from obelisk.build.device import COUNTER_BYTES, write_bundle
from obelisk.build.probe import device_facts, machine_of
from obelisk.ir import Graph, KernelGraph
from obelisk.lower.cuda import CudaKernel, CudaLaunch, CudaModule, Place, Pointer
from obelisk.tune import Contender, Status, TuneItem, cuda_rig, tune
from obelisk.tune.gpu_worker import DeviceArray
from obelisk.tune.types import Setup

try:
    MACHINE = machine_of(device_facts())
except ObeliskError as error:
    pytest.skip(f"no CUDA device here: {error}", allow_module_level=True)

pytestmark = pytest.mark.device
ROWS, COLUMNS = 64, 96
SCRATCH = 256
HEAD = 'extern "C" __global__ void k(const float *x, float *y, float *scratch, unsigned *c) {\n'
LINE = "  const int i = blockIdx.x * blockDim.x + threadIdx.x;\n"
RIGHT = "  y[i] = 2.0f * x[i] + 1.0f;\n"
BODIES = {
    "slow": LINE + "  for (int k = 0; k < 20000; ++k) __nanosleep(1);\n" + RIGHT,
    "half": LINE + "  if (i < 3072) y[i] = 2.0f * x[i] + 1.0f;\n",
    "off": LINE + "  y[i] = 2.0f * x[i] + 1.01f;\n",
    "beyond": LINE + RIGHT + "  if (i == 0) y[6144] = 1.0f;\n",
    "spoils": LINE + RIGHT + "  if (i == 3) const_cast<float *>(x)[3] = 0.0f;\n",
    "trusting": LINE + "  y[i] = 2.0f * x[i] + 1.0f + scratch[0];\n",
    "counting": LINE + "  if (*c == 0) y[i] = 2.0f * x[i] + 1.0f;\n  __syncthreads();\n"
    "  if (i == 0) { for (int k = 0; k < 9; ++k) __nanosleep(9999); *c = 1; }\n",
    "behind": LINE + RIGHT + "  if (i == 0) c[1] = 7;\n",
    "illegal address": LINE + "  *(volatile float *)(16 + 4 * i) = 1.0f;\n",
    "illegal instruction": LINE + '  asm volatile("trap;");\n',
    "misaligned": LINE + "  *(volatile double *)((char *)y + 4) = 1.0;\n",
    "hang": LINE + "  while (*(volatile float *)x == *(volatile float *)x) __nanosleep(100);\n",
    "right": LINE + RIGHT,
}
EXPECTED = {
    "half": (Status.INCOMPLETE, "3072 of 6144 elements were not written"),
    "off": (Status.WRONG, "times the tolerance"),
    "beyond": (Status.OVERRUN, "after its end"),
    "spoils": (Status.OVERRUN, "input 0: it was changed, first at byte 12"),
    "trusting": (Status.WRONG, "nan"),
    "counting": (Status.STALE, "on call 2"),
    "behind": (Status.OVERRUN, "scratch area"),
    "illegal address": (Status.CRASH, "ILLEGAL_ADDRESS"),
    "illegal instruction": (Status.CRASH, "CUDA_ERROR"),
    "misaligned": (Status.CRASH, "MISALIGNED_ADDRESS"),
    "hang": (Status.HANG, "no answer within"),
}


def program() -> Graph:
    """y = 2 x + 1."""
    g = KernelGraph("line")
    x = g.input((ROWS, COLUMNS), "f32", name="x")
    g.output(x * 2.0 + 1.0, name="y")
    return g.freeze()


def item(folder: Path, name: str, threads: int = 128) -> TuneItem:
    """A candidate with one kernel of this body."""
    cubin = compile_cuda(HEAD + BODIES[name] + "}\n", MACHINE.arch, directory=folder / "build")
    kernel = CudaKernel("k", "", ROWS * COLUMNS // 128, threads, 0)
    places = (Place.INPUT, Place.OUTPUT, Place.SCRATCH, Place.COUNTER)
    launch = CudaLaunch(0, tuple(Pointer(p, 0, 0) for p in places), "line")
    module = CudaModule((kernel,), (launch,), SCRATCH, 1, name, ())
    path = write_bundle(module, [cubin.path], folder)
    return TuneItem(name, program(), path, SCRATCH + COUNTER_BYTES)


def torch_twice(setup: Setup) -> list[object]:
    """y = 2 x + 1 by torch, on the worker's own memory."""
    import torch

    def call(array: DeviceArray) -> object:
        x = torch.as_tensor(array, device="cuda").view(torch.float32).reshape(ROWS, COLUMNS)
        return lambda: 2 * x + 1

    return [call(arrays[0]) for arrays in setup.copies]


def torch_fails(setup: Setup) -> list[object]:
    """A baseline that raises."""
    raise ValueError("not on this device")


def test_each_fault_has_its_name_and_the_good_win(tmp_path: Path) -> None:
    """Eleven faults between two right kernels; a baseline in the same rounds, one that fails."""
    items = [item(tmp_path, name) for name in BODIES]
    contenders = [Contender("torch", torch_twice), Contender("broken", torch_fails)]
    report = tune(
        program(), items, contenders=contenders, rig=cuda_rig(), budget_seconds=60.0,
        limit_seconds=5.0,
    )  # fmt: skip
    for found in report.items:
        status, words = EXPECTED.get(found.name, (Status.OK, ""))
        assert found.status is status, found
        assert words in found.detail, found
    assert report.winner == len(items) - 1
    best, first = report.items[-1], report.items[0]
    assert best.seconds is not None
    assert first.seconds is not None
    assert best.seconds < first.seconds
    assert report.bandwidth is not None
    assert report.bandwidth > 1e11
    ours, broken = report.contenders
    assert ours.status is Status.OK, ours
    assert ours.seconds is not None
    assert 1e-7 < ours.seconds < 1e-3
    assert broken.status is Status.UNLOADABLE
    assert "not on this device" in broken.detail


def test_a_launch_that_cannot_be_is_refused(tmp_path: Path) -> None:
    """More threads than a block may have: the driver's refusal is the status, nothing is lost."""
    report = tune(
        program(), [item(tmp_path, "right"), item(tmp_path, "right", 4096)], rig=cuda_rig(),
        budget_seconds=10.0,
    )  # fmt: skip
    assert [m.status for m in report.items] == [Status.OK, Status.REFUSED]
    assert "launching a kernel failed" in report.items[1].detail


def test_the_device_is_described_by_its_own_limits() -> None:
    """R35: what the driver says is what is planned with."""
    facts = device_facts()
    assert MACHINE.shared_bytes == facts.shared_bytes
    assert MACHINE.cores == facts.cores
    assert MACHINE.capability == facts.capability
    assert MACHINE.last_cache == facts.cache
