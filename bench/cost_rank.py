"""How well the cost model ranks: predicted against measured times of candidates on one core.

Each candidate of a family is lowered to C, built, and run on one thread; its time is the least CPU
time of the thread over several calls, which other work on the machine disturbs little. Prints one
line a candidate, and for each family the share of pairs that are ranked as measured and how far
the predicted best is from the measured best.

    python -m bench.cost_rank [gqa rmsnorm gated_mlp lora matmul] [--seconds 0.25] [--brief]
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable

import numpy as np
from tests import machine_candidates as mc

from obelisk.build import Library, compile_c
from obelisk.ir import DType, Graph, random_inputs
from obelisk.lower.cpu import lower_cpu
from obelisk.machine import estimate, host

F32 = DType.F32
GQA = mc.attention_shapes(1, 2, 256, 4096, 64)
Named = list[tuple[str, Graph]]


def gqa() -> Named:
    """Five kernels; one kernel by rows and iterations; key splits with a combine kernel."""
    out = [("op by op", mc.attention_plain(GQA, F32))]
    for rows, loop in itertools.product((1, 2, 4, 8, 16, 64, 256), (1, 4, 16, 64, 256)):
        out.append((f"fused {rows} x {loop}", mc.attention_fused(GQA, F32, rows, loop)))
    for rows, splits, loop in itertools.product((2, 8), (2, 8), (2, 8)):
        graph = mc.attention_split(GQA, F32, rows, splits, loop)
        out.append((f"split {rows} x {splits} x {loop}", graph))
    return out


def rmsnorm() -> Named:
    """Batch 1: op by op, a norm kernel and a product, and one kernel by columns and iterations."""
    shape = (2, 4096, 6144)
    out = [("op by op", mc.norm_linear_plain(*shape, F32))]
    out.append(("two 2 x 16", mc.norm_linear_two(*shape, 2, 16, F32)))
    for parts, loop in itertools.product((1, 2, 4, 16, 96, 384), (1, 4, 16, 64, 512)):
        out.append((f"fused {parts} x {loop}", mc.norm_linear_fused(*shape, parts, loop, F32)))
    return out


def gated_mlp() -> Named:
    """Four kernels, and one with two accumulators by columns and iterations."""
    shape = (8, 4096, 4096)
    out = [("op by op", mc.gated_plain(*shape, F32))]
    for parts, loop in itertools.product((2, 4, 16, 64, 256), (1, 4, 16, 64, 512)):
        out.append((f"fused {parts} x {loop}", mc.gated_fused(*shape, parts, loop, F32)))
    return out


def lora() -> Named:
    """Four kernels, and one by columns."""
    fused = [(f"fused {parts}", mc.lora_fused(F32, parts)) for parts in (1, 2, 4, 16, 64, 256)]
    return [("op by op", mc.lora_plain(F32)), *fused]


def matmul() -> Named:
    """512 x 512 x 512 by rows, columns and iterations."""
    grids = ((1, 1), (2, 1), (1, 2), (2, 2), (4, 4), (8, 8), (32, 32))
    return [
        (f"{grid} x {loop}", mc.square_matmul(512, 512, 512, grid, loop, F32))
        for grid, loop in itertools.product(grids, (1, 4, 32))
    ]


FAMILIES: dict[str, Callable[[], Named]] = {
    f.__name__: f for f in (gqa, rmsnorm, gated_mlp, lora, matmul)
}


def measured(graph: Graph, seconds: float) -> float:
    """Least CPU seconds of a call on one thread."""
    module = lower_cpu(graph, host(1))
    library = Library(compile_c(module.source).path, module.scratch_bytes)
    arrays = random_inputs(graph, 0, 0.1)
    outs = [np.empty(o.shape, o.dtype.numpy) for o in graph.outputs]
    best, calls, end = float("inf"), 0, time.monotonic() + seconds
    while calls < 4 or time.monotonic() < end:
        start = time.thread_time()
        library.run(arrays, outs, 1)
        best = min(best, time.thread_time() - start)
        calls += 1
    return best


def main() -> None:
    """Measure and print the families."""
    parser = argparse.ArgumentParser(prog="python -m bench.cost_rank", description=__doc__)
    parser.add_argument("families", nargs="*", help=", ".join(FAMILIES))
    parser.add_argument("--seconds", type=float, default=0.25, help="for each candidate")
    parser.add_argument("--brief", action="store_true", help="summaries only")
    args = parser.parse_args()
    for name in args.families or FAMILIES:
        rows = sorted(
            (measured(graph, args.seconds), estimate(graph, host(1)).seconds, label)
            for label, graph in FAMILIES[name]()
        )
        if not args.brief:
            for got, said, label in rows:
                print(f"  {label:18s} measured {got * 1e3:8.3f} ms, predicted {said * 1e3:8.3f} ms")
        pairs = list(itertools.combinations(rows, 2))
        agree = sum((a[1] - b[1]) * (a[0] - b[0]) > 0 for a, b in pairs) / len(pairs)
        chosen = min(rows, key=lambda r: r[1])
        print(
            f"{name}: {len(rows)} candidates, {rows[0][0] * 1e3:.2f} to {rows[-1][0] * 1e3:.2f} "
            f"ms, concordance {agree:.2f}, predicted best {chosen[2]} takes "
            f"{chosen[0] / rows[0][0]:.2f} times the best"
        )


if __name__ == "__main__":
    main()
