"""CUDA plans without a GPU: written and read, refused by name, synthesised with and without a
device (a stand-in for one), and the border between Python and the kernel's text.
"""

from __future__ import annotations

import ctypes
import re
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests import fake_cuda
from tests.mega_gptq import save_gptq
from tests.mega_models import config, random_tensors, save_model
from typer.testing import CliRunner

from obelisk.__main__ import app
from obelisk.app import synth_cuda
from obelisk.app.synth_cuda import make_cuda_plan, matching_device, step_bytes, synthesise_cuda
from obelisk.base.errors import Infeasible, InternalError, MissingDependency, UserError
from obelisk.machine import find
from obelisk.plan import HostIdentity, Plan, read_plan, write_plan
from obelisk.runtime import load_session
from obelisk.runtime.cuda import CudaLaunch, CudaSession, _seconds, gpu_refusal
from obelisk.runtime.session import packed_weights
from obelisk.schedule import Sync, place
from obelisk.schedule.gpu_default import default_tiling
from obelisk.schedule.vm import VirtualMachine
from obelisk.tasks import StepShape, Tiling, WeightFormat, Workload, parse_config

CONFIG = config("qwen3", num_hidden_layers=2)
MODEL = parse_config(CONFIG)
WORK = Workload(2, 64, WeightFormat.BF16)
H200 = find("h200")
HERE = HostIdentity("CUDA", "sm_90a", "NVIDIA H200", (), 132)


def plan_of(**changes: Any) -> Plan:
    """A plan whose binary nobody runs."""
    tiling = default_tiling(MODEL, WORK, H200)
    return replace(make_cuda_plan(MODEL, WORK, tiling, H200, binary=b"cubin"), **changes)


def test_a_plan_reads_back_and_is_stable(tmp_path: Path) -> None:
    """Equal plans are equal bytes; the members are named for what they are."""
    import zipfile

    plan = plan_of()
    for name in ("a", "b"):
        write_plan(plan, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    back = read_plan(tmp_path / "a")
    assert back.manifest() == plan.manifest()
    assert back.cache.format == "bf16"
    assert back.cache.nbytes == 2 * 2 * 2 * 2 * 2 * 64 * 24
    names = zipfile.ZipFile(tmp_path / "a").namelist()
    assert names == ["plan.json", "kernel.cu", "kernel.cubin"]


def test_other_devices_are_refused_by_name() -> None:
    """Architecture, product, and the count of SMs."""
    made = HostIdentity("CUDA", "sm_90a", "", (), 132)
    assert gpu_refusal(made, HERE, (9, 0)) is None
    assert "made for sm_90a, this is NVIDIA L20 (sm_89)" in str(
        gpu_refusal(made, replace(HERE, title="NVIDIA L20"), (8, 9))
    )
    assert "made for NVIDIA H100" in str(
        gpu_refusal(replace(made, title="NVIDIA H100"), HERE, (9, 0))
    )
    assert "needs 132 SMs, NVIDIA H200 has 114" in str(
        gpu_refusal(made, replace(HERE, cores=114), (9, 0))
    )


def test_without_bindings_nothing_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clear error, not a crash; and an unknown target is named."""
    write_plan(plan_of(), tmp_path / "plan")
    for name in ("cuda", "cuda.bindings", "cuda.bindings.driver"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingDependency, match=r"obelisk\[cuda\]"):
        load_session(tmp_path / "plan")
    assert matching_device(H200, 1) is None
    with pytest.raises(UserError, match="not for tpu"):
        load_session(plan_of(target="tpu"))


def test_without_a_driver_there_is_no_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bindings alone, as where plans are made for other machines: no device, and no crash."""

    def nothing(_: int) -> Any:
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    device = fake_cuda.install(lambda name, made: monkeypatch.setitem(sys.modules, name, made))
    device.cuInit = nothing  # type: ignore[attr-defined]
    write_plan(plan_of(), tmp_path / "plan")
    with pytest.raises(UserError, match="no CUDA device here"):
        load_session(tmp_path / "plan")
    assert matching_device(H200, 1) is None


def test_the_launch_record_is_the_kernels() -> None:
    """Field by field, in order: names, and the width of each."""
    text = files("obelisk.mega.cuda").joinpath("runtime", "base.cuh").read_text(encoding="utf-8")
    body = re.search(r"struct om_launch \{(.*?)\n\};", text, re.S)
    assert body is not None
    code = re.sub(r"/\*.*?\*/", "", body[1])
    rename = {"values_between": "exchanged"}
    found = []
    for line in filter(None, (x.strip() for x in code.split(";"))):
        matched = re.match(r"(?:const )?(char|u64|u32|int|float|om_fault)\s*(.*)", line, re.S)
        assert matched is not None, line
        kind, rest = matched.groups()
        for item in (x.strip() for x in rest.split(",")):
            name = re.sub(r"[*\[\]]|OM_SLOTS", "", item).strip()
            wide = 8 if item.startswith("*") or kind == "u64" else 4
            found.append((rename.get(name, name), wide * (8 if "[" in item else 1)))
    mine = [(n, ctypes.sizeof(t)) for n, t, *_ in CudaLaunch._fields_]
    assert found == mine


def test_faults_and_stamps_are_told_in_words() -> None:
    """Who waited for what, where; seconds since the first stamp that was filled."""
    session = CudaSession.__new__(CudaSession)
    session.plan, session.spin_seconds = plan_of(), 5.0
    session.how = session.plan.schedule["launch"]
    said = session._waited([1, 7, 1, 3, 4, 1, 5, 2])
    assert (
        "block 7 (consumer) waited 5 s in step 4, layer 1, for up: expected mark 5, saw 2" in said
    )
    assert "the end of the step" in session._waited([1, 7, 1, 4, 0, 2, 5, 2])
    stamps = np.zeros((2, 2, 3), np.uint64)
    stamps[0, 0] = (4096, 1_000_000_500, 1_000_002_000)
    stamps[1, 0] = (0, 1_000_000_000, 1_000_001_000)
    out = _seconds(stamps, np.array([1, 1], np.int32))
    assert out[0, 0, 1:].tolist() == pytest.approx([5e-7, 2e-6])
    assert out[1, 0, 1] == 0.0


def test_a_debug_mode_that_is_not_there_is_refused() -> None:
    """Nothing is ignored in silence."""
    session = CudaSession.__new__(CudaSession)
    session.plan, session.debug, session.position = plan_of(), True, np.zeros(2, np.int32)
    with pytest.raises(UserError, match="no debug mode"):
        session.launch([[1]], [1])


class _Stand:
    """A device that is right, or not: the float64 meanings behind the interface of a session."""

    wrong = wrong_value = 0.0
    seconds: Sequence[float] = ()
    opened: list[Plan] = []  # noqa: RUF012 (a list of the test's, reset by it)

    def __init__(self, plan: Plan, arena: Any) -> None:
        self.plan, self.keep_logits = plan, False
        self.position = np.zeros(plan.batch, np.int64)
        self.steps_done = 1
        self.kernel_seconds = self.seconds[len(self.opened) % len(self.seconds)]
        self.opened.append(plan)
        shape = StepShape(MODEL, Workload(plan.batch, plan.context), Tiling())
        self.machine = VirtualMachine(place(shape, Sync.COUNTER), self.weights)

    weights: Any = None

    def launch(self, feeds: Sequence[Sequence[int]], want: Sequence[int]) -> None:
        if self.keep_logits:
            for tokens in zip(*feeds, strict=True):
                self.got = self.machine.step(tokens)
            self.got[0, 3] += self.wrong * np.abs(self.got).max()

    def logits(self) -> Any:
        return self.got

    def cached(self, count: int) -> tuple[Any, Any]:
        keys, values = (x[:, :, :, :count].copy() for x in (self.machine.keys, self.machine.values))
        values[1, 0, 0, 4] *= 1 + self.wrong_value
        return keys, values

    def reset(self) -> None:
        self.position[:] = 0

    def close(self) -> None:
        return


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A model directory, a compiler that gives nothing, a device that is a stand-in."""
    tensors = save_model(tmp_path / "model", CONFIG)
    monkeypatch.setattr(synth_cuda, "build", lambda emitted, machine: b"cubin")
    monkeypatch.setattr(synth_cuda, "matching_device", lambda machine, blocks: HERE)
    monkeypatch.setattr(synth_cuda, "CudaSession", _Stand)
    monkeypatch.setattr(_Stand, "weights", staticmethod(tensors.__getitem__), raising=False)
    monkeypatch.setattr(_Stand, "opened", [])
    monkeypatch.setattr(_Stand, "seconds", (3e-6, 1e-6, 2e-6))
    return tmp_path / "model"


def test_the_fastest_of_what_was_timed_is_judged_and_kept(stand: Path) -> None:
    """Three cuts, the second is the fastest; the plan names the device and says what was found."""
    made = synthesise_cuda(stand, WORK, H200, profile=3)
    assert [p.seconds for p in made.profiled] == [3e-6, 1e-6, 2e-6]
    assert made.plan.measured["step_seconds"] == 1e-6
    assert made.plan.source == _Stand.opened[1].source
    assert made.plan.host == HERE
    assert made.plan.tolerance is not None
    assert made.plan.tolerance < 2e-2  # bf16 weights against the same, and no kernel between
    assert (made.plan.judged["positions"], made.plan.judged["slots"]) == (20, 2)
    assert 0 < made.plan.judged["keys"] < 2e-2
    assert made.plan.measured["step_bytes"] == step_bytes(made.plan, 32)
    assert set(made.plan.weights_digests) == {"model.safetensors"}


def test_a_kernel_that_differs_is_not_written(stand: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One logit off by a fifth of the largest."""
    monkeypatch.setattr(_Stand, "wrong", 0.2)
    with pytest.raises(InternalError, match="differs from its meaning"):
        synthesise_cuda(stand, WORK, H200, profile=1)


def test_a_layer_that_differs_is_named(stand: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of one position, one head, the last layer: no logit need show it."""
    monkeypatch.setattr(_Stand, "wrong_value", 2.0)
    with pytest.raises(InternalError, match="values of layer 1 by"):
        synthesise_cuda(stand, WORK, H200, profile=1)


def test_cuts_are_compiled_at_the_same_time(stand: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No build ends before all have begun; one that fails leaves the others."""
    together = threading.Barrier(3, timeout=30)

    def build(emitted: Any, machine: Any) -> bytes:
        if together.wait() == 0:
            raise Infeasible("the kernel spills 400 bytes of registers")
        return b"cubin"

    monkeypatch.setattr(synth_cuda, "build", build)
    monkeypatch.setattr(synth_cuda, "usable_cores", lambda: 3)
    made = synthesise_cuda(stand, WORK, H200, profile=3)
    assert len(made.profiled) == 2


def test_what_does_not_compile_is_left_out(stand: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first cut spills: the next is taken; when all do, the reason is told."""
    calls: list[int] = []

    def spills(emitted: Any, machine: Any) -> bytes:
        calls.append(1)
        if len(calls) == 1:
            raise Infeasible("the kernel spills 400 bytes of registers")
        return b"cubin"

    monkeypatch.setattr(synth_cuda, "build", spills)
    monkeypatch.setattr(synth_cuda, "matching_device", lambda machine, blocks: None)
    made = synthesise_cuda(stand, WORK, H200, profile=2)
    assert len(made.profiled) == 1
    assert made.profiled[0].seconds is None
    assert made.plan.host.title == ""
    assert made.plan.measured == {}
    calls.clear()
    with pytest.raises(Infeasible, match="spills 400 bytes"):
        synthesise_cuda(stand, WORK, H200, profile=1)


@pytest.mark.parametrize(
    ("weights", "symmetric", "group", "head"),
    [("w4a16", True, 64, "16"), ("w4a16:32", False, 32, "int8"), ("int8", True, 32, "int8")],
)
def test_narrow_weights_become_plans(
    stand: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: str, symmetric: bool,
    group: int, head: str,
) -> None:  # fmt: skip
    """A GPTQ checkpoint with groups and zeros of its own, by the command line; any format can be
    made of it. The head is what was asked for, and `plan show` says where it is not as usual.
    """
    monkeypatch.setattr(synth_cuda, "matching_device", lambda machine, blocks: None)
    folder, out = tmp_path / "gptq", tmp_path / "plan"
    save_gptq(folder, CONFIG, random_tensors(CONFIG, 1), group=group, symmetric=symmetric)
    done = CliRunner().invoke(
        app, ["synth", str(folder), "--device", "sm_90a", "--context", "64", "-o", str(out),
              "--weights", weights, "--head", head, "--profile", "2"],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    plan = read_plan(out)
    shown = CliRunner().invoke(app, ["plan", "show", str(out)]).output
    own = weights != "int8" and head == "int8"
    assert (f"w4a16 in groups of {group}, head int8" in shown) is own
    assert plan.workload.get("head") == ("int8" if own else None)
    layers, outer = plan.layout.layer_matrices, plan.layout.matrices
    assert {m.format for m in layers} == {weights.partition(":")[0]}
    assert plan.cache.format == "fp16"
    if weights == "int8":
        assert {m.format for m in outer} == {"int8"}
        return
    assert [m.format for m in outer] == ["fp16", "int8" if own else "fp16"]
    assert {m.group for m in layers} == {group}
    assert all((m.zero_offset < 0) == symmetric for m in layers)
    arena = packed_weights(plan, folder)
    assert arena.nbytes == plan.layout.total_bytes


def test_the_command_line_compiles_for_a_gpu_that_is_not_here(stand: Path, tmp_path: Path) -> None:
    """synth and plan show; fp32 weights have an fp32 cache."""
    run = CliRunner()
    out = tmp_path / "plan"
    done = run.invoke(
        app, ["synth", str(stand), "--device", "sm_90a", "--context", "64", "-o", str(out),
              "--profile", "1"],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    shown = run.invoke(app, ["plan", "show", str(out)])
    assert shown.exit_code == 0
    assert "cuda, 12 blocks" in shown.output
    assert "NVIDIA H200 (CUDA, sm_90a)" in shown.output
    source = run.invoke(app, ["plan", "show", str(out), "--source"]).output
    assert 'extern "C" __global__' in source
    done = run.invoke(
        app, ["synth", str(stand), "--device", "sm_89", "--context", "64", "-o", str(out),
              "--profile", "1", "--weights", "fp32"],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    plan = read_plan(out)
    assert (plan.workload["weights"], plan.cache.format) == ("fp32", "fp32")
    assert {m.format for m in (*plan.layout.matrices, *plan.layout.layer_matrices)} == {"fp32"}
