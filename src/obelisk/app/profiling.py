"""`obelisk profile`: a compiled program kernel by kernel.

Takes a `Compiled`; gives a `Profile`: for each launch its time, the bytes of the tensors that it
touches, the bandwidth that follows, and on a CUDA device how much of an SM it fills, with the
hardware counters of ncu where that works. It promises times by the tuner's own protocol, in a
process of its own, and that what could not be read is said so.
"""

from __future__ import annotations

import csv
import io
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from obelisk.app.backend_cuda import MODULE, cubin_name
from obelisk.app.backends import backend_of, on_gpu
from obelisk.app.compiled import Artifact, Compiled
from obelisk.base.errors import InternalError, UserError
from obelisk.build import Library, compile_c
from obelisk.build.device import module_from_json, write_bundle
from obelisk.ir import Graph, Node, Op, make_graph, random_inputs
from obelisk.ir.build import const, input_node
from obelisk.ir.graph import Launch
from obelisk.ir.node import make
from obelisk.ir.table import size_value
from obelisk.lower.cpu import lower_cpu
from obelisk.lower.cuda import CudaModule, Place
from obelisk.machine import host
from obelisk.tune.bench import Bench
from obelisk.tune.supervisor import Fallen

SCHEMA = 1
ROUNDS = 15
LIMIT = 60.0  # seconds for the worker to answer
NCU_SECONDS = 120.0
CPU_SECONDS = 0.2  # of timing for each kernel
METRICS = {
    "gpu__time_duration.sum": "ncu_us",
    "dram__bytes_read.sum": "dram_read_bytes",
    "dram__bytes_write.sum": "dram_write_bytes",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "dram_percent",
    "lts__t_sector_hit_rate.pct": "l2_hit_percent",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "sm_percent",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "warps_active_percent",
    "l1tex__data_bank_conflicts_pipe_lsu.sum": "bank_conflicts",
}
_SCALE = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}


@dataclass(frozen=True, slots=True)
class KernelProfile:
    """One launch.

    Attributes:
        number, what: its place in the call, and the graph's node that it computes.
        time_us, spread_us: median of one launch, and the interquartile range.
        bytes: of the tensors that it reads and writes, each once.
        bandwidth: bytes per second that follow.
        blocks, threads, registers, shared: of the launch (0 on a CPU where they mean nothing).
        resident: blocks that an SM holds at a time, by the driver's calculator.
        occupancy: share of an SM's threads that these are; None on a CPU.
        counters: what ncu read, by a short name; empty where it did not.
    """

    number: int
    what: str
    time_us: float
    spread_us: float
    bytes: int
    bandwidth: float
    blocks: int = 0
    threads: int = 0
    registers: int = 0
    shared: int = 0
    resident: int = 0
    occupancy: float | None = None
    counters: dict[str, float] | None = None


@dataclass(frozen=True, slots=True)
class Profile:
    """A whole call: its kernels in order, the time of all of them together, and what to know."""

    program: str
    device: str
    time_us: float
    spread_us: float
    kernels: tuple[KernelProfile, ...]
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The documented JSON form (docs/cli.md)."""
        return {"schema": SCHEMA, **asdict(self)}


def profile(best: Compiled, device: str, *, counters: bool = True) -> Profile:
    """Measure every kernel of a compiled program on `device`.

    `counters` asks ncu, too, where it is installed. Raises `UserError` where the program was built
    for another kind of device, or where there is none.
    """
    artifact = best.artifact
    if on_gpu(device) != on_gpu(artifact.backend):
        raise UserError(
            f"{artifact.program.name} was built for {artifact.backend}, and --device is {device}"
        )
    if on_gpu(device):
        return _profile_cuda(artifact, device, counters)
    return _profile_cpu(artifact)


def _spread(samples: Sequence[float]) -> float:
    ordered, n = sorted(samples), len(samples)
    return ordered[3 * n // 4] - ordered[n // 4]


# --- CUDA -----------------------------------------------------------------------------------------


def _profile_cuda(artifact: Artifact, device: str, counters: bool) -> Profile:
    backend = backend_of(device)
    machine = backend.machine(device)
    if list(machine.capability or ()) != artifact.target["capability"]:
        raise UserError(
            f"{artifact.program.name} was built for {artifact.target['arch']}; {device} is "
            f"{machine.arch}"
        )
    module = module_from_json(json.loads(artifact.files[MODULE]))
    with tempfile.TemporaryDirectory(prefix="obelisk-") as folder:
        bundle = _bundle(artifact, module, Path(folder))
        answer = _ask(artifact, device, bundle)
    notes: list[str] = []
    read: list[dict[str, float]] = []
    if counters:
        read, why = _ncu(artifact, device, len(module.launches))
        if why:
            notes.append(f"no hardware counters: {why}")
    sizes = launch_bytes(artifact.program, module)
    kernels = []
    for row, size in zip(answer["launches"], sizes, strict=True):
        seconds = median(row["seconds"])
        number = row["launch"]
        kernels.append(
            KernelProfile(
                number=number,
                what=row["origin"],
                time_us=seconds * 1e6,
                spread_us=_spread(row["seconds"]) * 1e6,
                bytes=size,
                bandwidth=size / seconds,
                blocks=row["blocks"],
                threads=row["threads"],
                registers=row["registers"],
                shared=row["shared"],
                resident=row["resident"],
                occupancy=row["resident"] * row["threads"] / machine.threads_per_core,
                counters=read[number] if number < len(read) else None,
            )
        )
    whole = answer["seconds"]
    return Profile(
        artifact.program.name, machine.title, median(whole) * 1e6, _spread(whole) * 1e6,
        tuple(kernels), tuple(notes),
    )  # fmt: skip


def _bundle(artifact: Artifact, module: CudaModule, folder: Path) -> Path:
    cubins = []
    for i in range(len(module.kernels)):
        path = folder / cubin_name(i)
        path.write_bytes(artifact.files[cubin_name(i)])
        cubins.append(path)
    return write_bundle(module, cubins, folder)


def _ask(artifact: Artifact, device: str, bundle: Path) -> dict[str, Any]:
    """Check one call in a worker, then let it measure every launch."""
    rig = backend_of(device).rig(device)
    with Bench(artifact.program, 0, 1, LIMIT, artifact.scratch_bytes, rig) as bench:
        try:
            bench.child.ask(LIMIT, "load", key=0, path=str(bundle))
            bench.put(0)
            bench.blank(0, artifact.scratch_bytes)
            bench.child.ask(LIMIT, "run", key=0, which=0, first=False)
            judged = bench.judged(0, 0)
            if judged.detail:
                raise InternalError(f"{artifact.program.name}: {judged.detail}")
            _, copies, _ = rig.copies(sum(n.nbytes for n in artifact.program.inputs))
            for copy in range(copies):
                bench.put(copy % bench.inputs.sets)
                bench.child.ask(LIMIT, "snapshot")
            return bench.child.ask(LIMIT, "profile", key=0, rounds=ROUNDS)
        except Fallen as error:
            raise InternalError(f"{artifact.program.name}: {error.detail}") from error


def launch_bytes(program: Graph, module: CudaModule) -> list[int]:
    """Bytes of the tensors that each launch reads or writes, each once.

    Tensors between kernels reach from their offset to the next one in use, at most to the end.
    """
    offsets = {p.offset for x in module.launches for p in x.arguments if p.place is Place.SCRATCH}
    ends = [*sorted(offsets), module.scratch_bytes]
    size_of = {a: b - a for a, b in pairwise(ends)}
    out = []
    for launch in module.launches:
        total = 0
        for place, index, offset in {(p.place, p.index, p.offset) for p in launch.arguments}:
            match place:
                case Place.INPUT:
                    total += int(program.inputs[index].nbytes)
                case Place.OUTPUT:
                    total += int(program.outputs[index].nbytes)
                case Place.SCRATCH:
                    total += size_of.get(offset, 0)
                case Place.COUNTER:
                    pass
        out.append(total)
    return out


def _ncu(artifact: Artifact, device: str, launches: int) -> tuple[list[dict[str, float]], str]:
    """Counters of each launch of one call under ncu, or why there are none."""
    tool = shutil.which("ncu")
    if tool is None:
        return [], "ncu is not on the PATH"
    with tempfile.TemporaryDirectory(prefix="obelisk-") as folder:
        module = module_from_json(json.loads(artifact.files[MODULE]))
        bundle = _bundle(artifact, module, Path(folder))
        sizes = [[n.nbytes for n in x] for x in (artifact.program.inputs, artifact.program.outputs)]
        words = [json.dumps(sizes), str(bundle), str(backend_of(device).rig(device).ordinal)]
        command = [
            tool, "--csv", "--page", "raw", "--clock-control", "none", "--launch-skip",
            str(launches), "--metrics", ",".join(METRICS), sys.executable, "-m",
            "obelisk.app.profile_child", *words,
        ]  # fmt: skip
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=NCU_SECONDS, check=False
            )
        except (OSError, subprocess.SubprocessError) as error:
            return [], f"ncu: {error}"
    rows = parse_ncu(done.stdout)
    if len(rows) != launches:
        said = [x for x in (done.stdout + done.stderr).splitlines() if "==" in x or "rror" in x]
        return [], f"ncu told of {len(rows)} launches of {launches}: {' '.join(said)[-300:]}"
    return rows, ""


def parse_ncu(text: str) -> list[dict[str, float]]:
    """The counters of each launch from ncu's CSV (a row of names, a row of units, then values)."""
    lines = [x for x in text.splitlines() if x.startswith('"')]
    rows = list(csv.reader(io.StringIO("\n".join(lines))))
    if len(rows) < 3:
        return []
    names, units, *values = rows
    out: list[dict[str, float]] = []
    for row in values:
        found: dict[str, float] = {}
        for name, unit, value in zip(names, units, row, strict=False):
            if name in METRICS:
                try:
                    number = float(value.replace(",", ""))
                except ValueError:  # a counter that this device does not have
                    continue
                found[METRICS[name]] = number * _SCALE.get(unit, 1.0)
        out.append(found)
    return out


# --- CPU ------------------------------------------------------------------------------------------


def _profile_cpu(artifact: Artifact) -> Profile:
    """Each launch as a program of its own, on inputs of its own."""
    kernels = []
    for number, launch in enumerate(artifact.graph.launches()):
        alone = launch_alone(launch)
        samples = _time_cpu(alone, artifact.threads)
        seconds = median(samples)
        size = sum(int(n.nbytes) for n in (*alone.inputs, *alone.outputs))
        kernels.append(
            KernelProfile(
                number,
                alone.name,
                seconds * 1e6,
                _spread(samples) * 1e6,
                size,
                size / seconds,
                blocks=1 if launch.block is None else launch.block.blocks,
            )
        )
    whole = _time_cpu(artifact.graph, artifact.threads)
    notes = ("each kernel was compiled and timed alone: what it leaves in the caches is not in it",)
    return Profile(
        artifact.program.name, host().title, median(whole) * 1e6, _spread(whole) * 1e6,
        tuple(kernels), notes,
    )  # fmt: skip


def launch_alone(launch: Launch) -> Graph:
    """One launch as a graph whose inputs are the tensors that it reads."""
    new: dict[Node, Node] = {}
    inputs: list[Node] = []
    for node in dict.fromkeys(launch.inputs):
        if node.op in (Op.CONST, Op.IOTA):
            new[node] = node
        elif node.op is Op.SIZE:
            new[node] = const(float(size_value(node)))
        else:
            new[node] = input_node(len(inputs), node.shape, node.dtype)
            inputs.append(new[node])
    results = [make(r.op, tuple(new[i] for i in r.inputs), r.attrs) for r in launch.results]
    block = launch.block
    what = launch.node.op.value if block is None else f"grid {'x'.join(map(str, block.grid))}"
    return make_graph(inputs, results, name=what)


def _time_cpu(graph: Graph, threads: int) -> list[float]:
    """Seconds of single calls of the default lowering, after one that warms up."""
    module = lower_cpu(graph, host())
    library = Library(compile_c(module.source, timeout=60.0).path, module.scratch_bytes)
    arrays = random_inputs(graph, 0)
    outs = [np.empty(o.shape, o.dtype.numpy) for o in graph.outputs]
    ins, results = [a.ctypes.data for a in arrays], [o.ctypes.data for o in outs]
    library.call(ins, results, threads)
    samples: list[float] = []
    ends = time.perf_counter() + CPU_SECONDS
    while len(samples) < 5 or (time.perf_counter() < ends and len(samples) < 1000):
        begin = time.perf_counter()
        library.call(ins, results, threads)
        samples.append(time.perf_counter() - begin)
    return samples
