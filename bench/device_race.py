"""The search's candidates in every lowering worth racing: built without a GPU, raced on one.

`build` searches, lowers each structure with all of `lower.cuda.variants` and compiles for an exact
architecture; `run` needs neither solver nor compiler. Timing and the comparison with float64 are
those of `device_subgraphs.py` (medians of CUDA-graph replays, about 400 MB of rotated inputs).
Programs run in a child process: a module that faults is named, and the race goes on behind it.

    python bench/device_race.py build DIR gqa gqa:8 lora ...
    python bench/device_race.py run DIR --out FILE.json
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

QUICK, FULL = 5, 30  # replays
FINALISTS = 4
MOST, STRUCTURES = 40, 3  # modules of a program, and of the search's structures
MANIFEST = "manifest.json"


def choices(spec: str, arch_machine: Any, seconds: float) -> Iterator[tuple[str, Any]]:
    """Distinct modules with all tiles in registers: a label and the module."""
    from obelisk.app.loading import load_program
    from obelisk.base.errors import Infeasible
    from obelisk.ir.resize import blocks_of
    from obelisk.lower.cuda import CudaOptions, lower_cuda, variants
    from obelisk.search import Budget, search

    name, _, batch = spec.partition(":")
    graph = load_program(name, batch=int(batch or 1), dtype="f16")
    found = search(graph, arch_machine, budget=Budget(seconds=seconds)).candidates[1:]
    seen: set[str] = set()
    structures = 0
    for number, candidate in enumerate(found, 1):
        fresh = False
        for options in variants(candidate.graph, arch_machine):
            try:
                module = lower_cuda(candidate.graph, arch_machine, options)
            except Infeasible:
                continue
            if any("in shared memory" in n for n in module.notes) or module.digest in seen:
                continue
            seen.add(module.digest)
            fresh = True
            sizes = ", ".join(f"{b.grid} x {b.loop}" for b in blocks_of(candidate.graph))
            default = CudaOptions()
            chosen = {
                f: getattr(options, f)
                for f in CudaOptions.__slots__
                if getattr(options, f) != getattr(default, f)
            }
            yield f"{number} [{sizes}] {chosen}", module
            if len(seen) == MOST:
                return
        structures += fresh
        if structures == STRUCTURES:
            return


def build(args: argparse.Namespace) -> None:
    """Write cubins and a manifest that names them."""
    from obelisk.app.loading import load_program
    from obelisk.build.cuda import Cubin, compile_cuda_many
    from obelisk.build.device import module_json
    from obelisk.ir.text import to_text
    from obelisk.machine import find

    machine = find(args.machine)
    shutil.rmtree(args.folder, ignore_errors=True)
    args.folder.mkdir(parents=True)
    numbers: dict[str, int] = {}
    programs: dict[str, Any] = {}
    for spec in args.programs:
        name, _, batch = spec.partition(":")
        graph = load_program(name, batch=int(batch or 1), dtype="f16")
        rows = [
            {
                "label": label,
                "module": module_json(module),
                "cubins": [numbers.setdefault(k.source, len(numbers)) for k in module.kernels],
            }
            for label, module in choices(spec, machine, args.seconds)
        ]
        programs[f"{name}_{batch or 1}"] = {"graph": to_text(graph), "modules": rows}
        print(spec, len(rows), flush=True)
    resources: dict[int, Any] = {}
    for number, built in enumerate(compile_cuda_many(list(numbers), machine.arch)):
        if isinstance(built, Cubin):
            shutil.copy(built.path, args.folder / f"{number}.cubin")
            resources[number] = [built.resources.registers, built.resources.spill_stores]
        else:
            print(f"not compiled: {built}", flush=True)
    for program in programs.values():
        program["modules"] = [
            {**m, "resources": [resources[c] for c in m["cubins"]]}
            for m in program["modules"]
            if all(c in resources for c in m["cubins"])
        ]
    (args.folder / MANIFEST).write_text(json.dumps(programs), encoding="utf-8")


def race(torch: Any, folder: Path, name: str, program: Any, skip: set[str]) -> None:
    """One program: a JSON line when a module begins and one when it ends, then the finalists."""
    from device_subgraphs import Program

    from obelisk.build.device import CudaLibrary, module_from_json
    from obelisk.ir import text

    measured = Program(torch, name, text.parse(program["graph"]))
    done = []
    for row in program["modules"]:
        label = row["label"]
        if label in skip:
            continue
        print(json.dumps({"program": name, "begin": label}), flush=True)
        module = module_from_json(row["module"])
        library = CudaLibrary(module, [folder / f"{c}.cubin" for c in row["cubins"]])
        got = measured.ours(library, QUICK)
        got["kernels"] = [
            {"blocks": k.blocks, "threads": k.threads, "shared": k.shared, "cluster": k.cluster,
             "bulk": bool(k.maps), "registers": r, "spill": s}
            for k, (r, s) in zip(module.kernels, row["resources"], strict=True)
        ]  # fmt: skip
        print(json.dumps({"program": name, "end": label, **got}), flush=True)
        if got["status"] == "ok":
            done.append((got["us"], label, library, got["kernels"]))
    done.sort(key=lambda d: d[0])
    for _, label, library, kernels in done[:FINALISTS]:
        row = {"final": label, **measured.ours(library, FULL), "kernels": kernels}
        print(json.dumps({"program": name, **row, "bytes": measured.bytes}), flush=True)
    print(json.dumps({"program": name, "finished": True}), flush=True)


def worker(args: argparse.Namespace) -> None:
    """All programs that are left."""
    import torch

    programs = json.loads((args.folder / MANIFEST).read_text(encoding="utf-8"))
    for name, program in programs.items():
        if name not in args.finished:
            race(torch, args.folder, name, program, set(args.skip))


def run(args: argparse.Namespace) -> None:
    """Child processes until every program is finished; then a table, and everything as JSON."""
    rows: list[dict[str, Any]] = []
    skip: list[str] = []
    finished: list[str] = []
    while True:
        command = [sys.executable, __file__, "worker", str(args.folder)]
        command += [f"--skip={s}" for s in skip] + [f"--finished={s}" for s in finished]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        got = [json.loads(line) for line in child.stdout if line.startswith("{")]
        code = child.wait()
        rows += got
        finished += [r["program"] for r in got if "finished" in r]
        if code == 0:
            break
        ended = {r["end"] for r in got if "end" in r}
        guilty = [r["begin"] for r in got if "begin" in r and r["begin"] not in ended]
        print(f"the child ended with {code} at {guilty}", flush=True)
        if not guilty:
            raise SystemExit("the child ended before any module began")
        skip += guilty
    args.out.write_text(json.dumps({"rows": rows, "faults": skip}, indent=1), encoding="utf-8")
    for name in dict.fromkeys(r["program"] for r in rows):
        mine = [r for r in rows if r["program"] == name]
        ended_rows = [r for r in mine if "end" in r]
        wrong = [r for r in ended_rows if r["status"] != "ok"]
        print(f"{name}: {len(ended_rows)} modules, {len(wrong)} wrong")
        for r in wrong[:3]:
            print(f"   wrong {r.get('error')} {r['end']}")
        for r in sorted((r for r in mine if "final" in r), key=lambda r: r["us"])[:3]:
            print(
                f"   {r['us']:.2f} [{r['low']:.2f}, {r['high']:.2f}] {r['error']:.0e} {r['final']}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("build", "run", "worker"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("programs", nargs="*")
    parser.add_argument("--machine", default="h200")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--out", type=Path, default=Path("race.json"))
    parser.add_argument("--skip", action="append", default=[])
    parser.add_argument("--finished", action="append", default=[])
    args = parser.parse_args()
    {"build": build, "run": run, "worker": worker}[args.what](args)


if __name__ == "__main__":
    main()
