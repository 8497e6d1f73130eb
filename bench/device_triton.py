"""Triton's kernels beside the CUDA target's on one device: the same graphs, the same method.

For each program the first candidates (`device_candidates.py` writes them) are lowered by both
targets, Triton with every variant, CUDA with its default and a few. Outputs are compared with
float64 first, then timed as in `device_subgraphs.py` (CUDA graphs, inputs rotated beyond the L2
cache, medians of replays). `--prepare` only lowers and compiles what Triton needs, without a GPU.

    python bench/device_triton.py --candidates DIR --out FILE.json gqa_1 lora_1 ...
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from device_subgraphs import FULL, QUICK, SEPARATOR, Program

from obelisk.base.errors import BuildFailed, Infeasible
from obelisk.build.triton import TritonCubin, compile_triton_many, launchable
from obelisk.ir import Graph, text
from obelisk.lower.triton import TritonModule, lower_triton
from obelisk.lower.triton import variants as triton_variants
from obelisk.machine import find

MACHINE = find("h200")
CUDA_VARIANTS = 4  # the default and three more


def graphs_of(folder: Path, name: str, most: int) -> list[Graph]:
    """The program itself, then its best candidates."""
    parts = (folder / f"{name}.txt").read_text(encoding="utf-8").split(SEPARATOR)
    return [text.parse(part) for part in parts[: most + 1]]


def triton_modules(graphs: list[Graph]) -> list[tuple[str, TritonModule]]:
    """Every variant of every graph, equal texts once."""
    found: dict[str, tuple[str, TritonModule]] = {}
    for number, graph in enumerate(graphs):
        try:
            options = triton_variants(graph, MACHINE)
            for choice in options:
                module = lower_triton(graph, MACHINE, choice)
                found.setdefault(module.digest, (f"{number} {choice}", module))
        except Infeasible as reason:
            print(f"  {number}: {reason}")
    return list(found.values())


def measured(program: Program, label: str, library: Any, reps: int) -> dict[str, Any]:
    """One contender; a wrong one is a result too."""
    row = {"label": label, **program.ours(library, reps)}
    return {k: v for k, v in row.items() if v is not None}


def race(program: Program, libraries: list[tuple[str, Any]]) -> dict[str, Any]:
    """All contenders quickly, the three fastest again."""
    rows = [measured(program, label, library, QUICK) for label, library in libraries]
    good = sorted((r for r in rows if r["status"] == "ok"), key=lambda r: r["us"])
    by_label = dict(libraries)
    finals = [measured(program, r["label"], by_label[r["label"]], FULL) for r in good[:3]]
    return {
        "contenders": len(rows),
        "wrong": [r for r in rows if r["status"] != "ok"],
        "best": min(finals, key=lambda r: r["us"]) if finals else None,
        "itself": next((r for r in good if r["label"].startswith("0 ")), None),
    }


def cuda_libraries(graphs: list[Graph]) -> list[tuple[str, Any]]:
    from obelisk.build.cuda import Cubin, compile_cuda_many
    from obelisk.build.device import CudaLibrary
    from obelisk.lower.cuda import lower_cuda, variants

    modules = []
    for number, graph in enumerate(graphs):
        for choice in variants(graph, MACHINE)[:CUDA_VARIANTS]:
            try:
                module = lower_cuda(graph, MACHINE, choice)
            except Infeasible:
                continue
            if number == 0 or not any("in shared memory" in n for n in module.notes):
                modules.append((f"{number} {choice}", module))
            if number == 0:
                break
    sources = list(dict.fromkeys(k.source for _, m in modules for k in m.kernels))
    built = dict(zip(sources, compile_cuda_many(sources, MACHINE.arch), strict=True))
    out = []
    for label, module in modules:
        cubins = [built[k.source] for k in module.kernels]
        good = [c.path for c in cubins if isinstance(c, Cubin)]
        if len(good) == len(cubins):
            out.append((label, CudaLibrary(module, good)))
    return out


def triton_libraries(
    modules: list[tuple[str, TritonModule]],
) -> tuple[list[tuple[str, Any]], list[str]]:
    from obelisk.build.device import CudaLibrary

    kernels = [k for _, m in modules for k in m.kernels]
    built = dict(zip(kernels, compile_triton_many(kernels, MACHINE), strict=True))
    out, refused = [], []
    for label, module in modules:
        cubins = [built[k] for k in module.kernels]
        failed = [c for c in cubins if isinstance(c, BuildFailed)]
        if failed:
            refused.append(f"{label}: {failed[0]}")
            continue
        good = [c for c in cubins if isinstance(c, TritonCubin)]
        out.append((label, CudaLibrary(launchable(module, good), [c.path for c in good])))
    return out, refused


def main() -> None:
    """Race, or only compile."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--candidates", type=Path, required=True)
    parser.add_argument("--most", type=int, default=6, help="candidates of a program")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--prepare", action="store_true")
    args = parser.parse_args()
    results: dict[str, Any] = {}
    for name in args.names:
        graphs = graphs_of(args.candidates, name, args.most)
        modules = triton_modules(graphs)
        if args.prepare:
            kernels = [k for _, m in modules for k in m.kernels]
            built = compile_triton_many(kernels, MACHINE)
            bad = [b for b in built if isinstance(b, BuildFailed)]
            print(name, len(modules), "modules", len(set(kernels)), "kernels", bad, flush=True)
            continue
        import torch

        program = Program(torch, name, graphs[0])
        libraries, refused = triton_libraries(modules)
        results[name] = {
            "triton": race(program, libraries),
            "cuda": race(program, cuda_libraries(graphs)),
            "refused": refused,
        }
        best = {t: (results[name][t]["best"] or {}).get("us") for t in ("triton", "cuda")}
        wrong = {t: len(results[name][t]["wrong"]) for t in ("triton", "cuda")}
        print(name, best, "wrong", wrong, "refused", len(refused), flush=True)
        if args.out:
            args.out.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
