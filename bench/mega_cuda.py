"""The CUDA megakernel on a device: is it right, how fast is it, what does each choice cost?

    python bench/mega_cuda.py check [--only fp32]        # small models against float64
    python bench/mega_cuda.py time NAME[:BATCH[:CONTEXT[:CHANGES[:FORMAT]]]] ...
    python bench/mega_cuda.py torch NAME[:BATCH[:CONTEXT]] ...
    python bench/mega_cuda.py build [SPECS]              # compile alone; without SPECS for check

Times are of one launch of 128 greedy steps from CONTEXT on (default 512), whole model, random
weights; CHANGES are fields of `GpuTiling`, `stages=12+kv_pieces=4`; FORMAT is bf16 (default), fp16,
fp32, int8, w4a16 or w4a16.64 (groups), the last two also with +head8, an int8 head. The baseline is
a bf16 decode step in torch, compiled, in a CUDA graph. Results go to --json FILE.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.mega_cuda_checks import CASES, changed, check_plan, plan_of, planned

from obelisk.app.synth_cuda import device_here, make_cuda_plan, step_bytes
from obelisk.base.digest import digest
from obelisk.machine import Machine, find
from obelisk.mega.cuda import emit_cuda
from obelisk.plan import Plan
from obelisk.runtime.cuda import CudaSession
from obelisk.runtime.cuda_driver import Device
from obelisk.runtime.cuda_driver import check as driver_check
from obelisk.schedule.gpu_default import default_tiling
from obelisk.tasks import Family, ModelConfig, Rope, Workload, parse_head, parse_weights

STEPS, LAUNCHES = 128, 7
SHAPES = {  # layers, hidden, heads, kv heads, head_dim, ffn, vocab, qk norm, qkv bias
    "llama3.2-1b": (16, 2048, 32, 8, 64, 8192, 128256, False, False),
    "qwen3-0.6b": (28, 1024, 16, 8, 128, 3072, 151936, True, False),
    "qwen2.5-1.5b": (28, 1536, 12, 2, 128, 8960, 151936, False, True),
    "qwen3-1.7b": (28, 2048, 16, 8, 128, 6144, 151936, True, False),
    "qwen3-8b": (36, 4096, 32, 8, 128, 12288, 151936, True, False),
}


def shape(name: str) -> ModelConfig:
    """A public model's figures; heads are counted as the real ones are (8b alone is not tied)."""
    layers, h, q, kv, d, f, v, qkn, bias = SHAPES[name]
    family = Family.QWEN3 if qkn else Family.QWEN2 if bias else Family.LLAMA
    return ModelConfig(
        family, h, layers, q, kv, d, f, v, 1e-6, Rope(1e6), name != "qwen3-8b", qkv_bias=bias,
        qk_norm=qkn,
    )  # fmt: skip


def ada(model: ModelConfig, work: Workload, changes: str, machine: Machine) -> Plan:
    """A plan under the budget of an RTX 4090 (99 KB, no copy engine) for all of this device's SMs,
    compiled to PTX of compute_89, which the driver translates when it loads it.
    """
    small = replace(find("sm_89"), cores=machine.cores)
    tiling = changed(default_tiling(model, work, small), changes)
    source = emit_cuda(model, work, tiling, small).source
    folder = Path(tempfile.gettempdir()) / "obelisk-ada"
    folder.mkdir(exist_ok=True)
    text = folder / f"{digest('ada', source)}.cu"
    ptx, part = text.with_suffix(".ptx"), text.with_suffix(".part")
    if not ptx.is_file():
        text.write_text(source)
        command = ["nvcc", "-ptx", "-std=c++17", "-arch=compute_89", "-o", str(part), str(text)]
        subprocess.run(command, check=True, timeout=200)
        part.rename(ptx)
    binary = ptx.read_bytes() + b"\0"  # the driver reads text up to it
    here = Device().identity(machine.arch)
    return make_cuda_plan(model, work, tiling, small, binary=binary, device=here)


def plan_for(spec: str, machine: Machine) -> Plan:
    """The plan of a spec; changes that begin with `ada` are for the budget of sm_89."""
    name, batch, context, changes, form = parts(spec)
    weights, _, head = form.replace(".", ":").partition("+head")
    kind, group = parse_weights(weights)
    own = parse_head({"": None, "8": "int8"}.get(head, head), kind)
    work = Workload(batch, context + STEPS, kind, group or 128, head=own)
    if changes.startswith("ada"):
        return ada(shape(name), work, changes.removeprefix("ada").lstrip("+"), machine)
    return planned(shape(name), work, changes, machine)


def check(machine: Machine, run: bool = True, only: str = "") -> list[dict[str, Any]]:
    """The small models whose case holds `only`; built alone where not `run`."""
    cases = [c for c in CASES if only in ", ".join(map(str, c))]

    def make(case: tuple[str, int, str, str]) -> Plan | Exception:
        try:
            return plan_of(case, machine)
        except Exception as error:
            return error

    with ThreadPoolExecutor(16) as pool:
        plans = list(pool.map(make, cases))
    rows: list[dict[str, Any]] = []
    for case, plan in zip(cases if run else [], plans if run else [], strict=True):
        try:
            if isinstance(plan, Exception):
                raise plan
            row = check_plan(case, plan)
        except Exception as error:
            row = {"model": case[0], "batch": case[1], "changes": case[3], "ok": False,
                   "raised": repr(error)[:300]}  # fmt: skip
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


# ---- time ----
def random_arena(plan: Plan) -> int:
    """The address of random weights on the device, gains of one. A pattern of 32 MB is repeated;
    8-bit and 4-bit matrices and their scales are laid over it.
    """
    device, layout = Device(), plan.layout
    draws = np.random.default_rng(0).standard_normal(1 << 24, np.float32) * np.float32(0.02)
    if plan.workload["weights"] == "fp32":
        pattern = draws.view(np.uint16)
    elif plan.workload["weights"] == "bf16":
        pattern = (draws.view(np.uint32) >> 16).astype(np.uint16)
    else:
        pattern = draws.astype(np.float16).view(np.uint16)
    arena = device.allocate(layout.total_bytes)
    device.upload(arena, pattern[: layout.total_bytes // 2])
    at = pattern.nbytes
    while at < layout.total_bytes:
        size = min(at, layout.total_bytes - at)
        driver_check(device.cu.cuMemcpyDtoD(arena + at, arena, size), "copying the pattern")
        at += size
    places = [(0, v) for v in layout.vectors]
    for i in range(layout.layers):
        places += [(layout.layer_offset + i * layout.layer_bytes, v) for v in layout.layer_vectors]
    ones = np.ones(max(v.size for _, v in places), np.float32)
    for base, v in places:
        device.upload(arena + base + v.offset, ones[: v.size])
    rng = np.random.default_rng(1)
    for m in (*layout.matrices, *layout.layer_matrices):
        if m.format not in ("int8", "w4a16"):
            continue
        levels = rng.integers(0, 256, m.nbytes, np.uint8)
        if m.format == "w4a16":
            slabs = levels.reshape(-1, m.slab_bytes)
            numbers = slabs.shape[1] - m.scale_offset
            slabs[:, m.scale_offset :] = np.full(numbers // 2, 0.004, np.float16).view(np.uint8)
        inner = m not in layout.matrices
        for i in range(layout.layers if inner else 1):
            base = arena + (layout.layer_offset + i * layout.layer_bytes if inner else 0)
            device.upload(base + m.offset, levels)
            if m.format == "int8":
                device.upload(base + m.scale_offset, np.full(m.rows, 3e-4, np.float32))
    return arena


def time_one(spec: str, plan: Plan, arena: int, context: int) -> dict[str, Any]:
    """Microseconds of one step: the median launch, and the spread."""
    session = CudaSession(plan, arena)
    runs = []
    for _ in range(LAUNCHES):
        session.position[:] = context
        session.launch([[1]] * plan.batch, [STEPS] * plan.batch)
        runs.append(session.kernel_seconds / session.steps_done * 1e6)
    runs = sorted(runs[1:])
    median = runs[len(runs) // 2]
    bytes_ = step_bytes(plan, context + STEPS // 2)
    row = {
        "spec": spec, "us": round(median, 1), "least": round(runs[0], 1),
        "most": round(runs[-1], 1), "TBs": round(bytes_ / median / 1e6, 3),
        "tiling": plan.schedule["tiling"],
        "shared": plan.schedule["shared"],
    }  # fmt: skip
    session.trace_room = 32 * plan.layout.layers
    session.position[:] = context
    session.launch([[1]] * plan.batch, [2] * plan.batch)
    phases: dict[str, list[float]] = {}
    for s in session.spans:
        phases.setdefault(s.kind, []).append((s.end - s.start) * 1e6)
    row["layer"] = layer_profile(session.spans, min(5, plan.layout.layers - 1))
    row["phases_us"] = {k: round(float(np.mean(v)), 2) for k, v in phases.items()}
    session.close()
    return row


def layer_profile(spans: list[Any], layer: int) -> list[list[Any]]:
    """Of one layer of the last step: for each phase, the least, middle and largest start and end
    over the blocks, in microseconds since the first start.
    """
    last = max(s.start for s in spans if s.kind == "norm_in" and s.layer == layer)
    of = [s for s in spans if s.layer == layer and abs(s.start - last) < 1e-4]
    zero = min(s.start for s in of if s.kind == "norm_in")
    of = [s for s in of if s.start >= zero and s.kind not in ("head", "norm_final")]
    out = []
    for kind in dict.fromkeys(s.kind for s in of):
        row: list[Any] = [kind]
        for ends in (
            [s.start for s in of if s.kind == kind],
            [s.end for s in of if s.kind == kind],
        ):
            x = sorted((t - zero) * 1e6 for t in ends)
            row += [round(x[0], 2), round(x[len(x) // 2], 2), round(x[-1], 2)]
        out.append(row)
    return out


def parts(spec: str) -> tuple[str, int, int, str, str]:
    """NAME:BATCH:CONTEXT:CHANGES:FORMAT."""
    name, batch, context, changes, form, *_ = [*spec.split(":"), "", "", "", ""]
    return name, int(batch or 1), int(context or 512), changes, form or "bf16"


def measure(specs: list[str], machine: Machine, run: bool = True) -> list[dict[str, Any]]:
    """Build all in parallel, then (`run`) time one by one; weights are made once for each model."""

    def make(spec: str) -> Plan | Exception:
        try:
            return plan_for(spec, machine)
        except Exception as error:
            return error

    start = time.perf_counter()
    with ThreadPoolExecutor(16) as pool:
        plans = list(pool.map(make, specs))
    print(f"built {len(specs)} in {time.perf_counter() - start:.1f} s", flush=True)
    if not run:
        return [{"spec": s, "raised": repr(p)[:300]} for s, p in zip(specs, plans, strict=True)
                if isinstance(p, Exception)]  # fmt: skip
    rows, arena, made = [], 0, ("", "")
    for spec, plan in zip(specs, plans, strict=True):
        name, _, context, _, form = parts(spec)
        try:
            if isinstance(plan, Exception):
                raise plan
            if (name, form) != made:
                if arena:
                    Device().free(arena)
                arena, made = random_arena(plan), (name, form)
            began = time.perf_counter()
            row = time_one(spec, plan, arena, context)
            row["took_s"] = round(time.perf_counter() - began, 2)
        except Exception as error:
            row = {"spec": spec, "raised": repr(error)[:300]}
        rows.append(row)
        print(
            json.dumps({k: v for k, v in row.items() if k not in ("tiling", "shared")}), flush=True
        )
    return rows


def main() -> None:
    """Run one part and write JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("check", "time", "torch", "build"))
    parser.add_argument("specs", nargs="*")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="", help="check: cases whose text holds this")
    args = parser.parse_args()
    if args.what == "torch":
        from mega_cuda_torch import baseline

        rows = [baseline(SHAPES[parts(s)[0]], *parts(s)[:3]) for s in args.specs]
    else:
        machine = device_here()
        run = args.what != "build"
        rows = measure(args.specs, machine, run) if args.specs else check(machine, run, args.only)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
