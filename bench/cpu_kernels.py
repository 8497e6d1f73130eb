"""Side by side: generated CPU kernels, numpy and torch, on the named programs and on one product.

Every contender of a program runs in each round, in rotating order, so that a slow moment hits
all of them; a line gives the median and the range of the middle half in microseconds, and the
ratio of the best library to ours.

    python bench/cpu_kernels.py [PROGRAM ...] [--threads 2] [--seconds 4] [--compile] [--square]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from obelisk.app.programs import PROGRAMS, PUBLISHED
from obelisk.build import Library, compile_c
from obelisk.ir import BlockBuilder, Graph, KernelGraph, Node, build, composite, make_graph
from obelisk.lower.cpu import CpuOptions, lower_cpu
from obelisk.machine.host import host

Call = Callable[[], Any]


def attention(grid: tuple[int, int], loop: int, norm: bool = False) -> Callable[[Graph], Graph]:
    """One kernel: a pass over the keys, rows cut by the grid."""

    def fused(program: Graph) -> Graph:
        q, k, v = program.inputs
        b = BlockBuilder(grid, loop)
        tq, tk = b.load(q, (0, 1)), b.load(k, (0, None), 2)
        tv = b.load(v, (0, None), 1)
        if norm:
            tq, tv = composite.rms_norm(tq), composite.rms_norm(tv)
        e = build.exp(build.matmul(tq, tk))
        top, low = build.accum_sum(build.matmul(e, tv)), build.accum_sum(build.sum(e, 2))
        b.store(build.div(top, low), (0, 1))
        return make_graph(program.inputs, b.launch(), program.input_names, name="fused")

    return fused


def rmsnorm(grid: int, loop: int) -> Callable[[Graph], Graph]:
    """One kernel: the division moved behind the product."""

    def fused(program: Graph) -> Graph:
        x, w = program.inputs
        b = BlockBuilder((grid,), loop)
        tx, tw = (
            b.load(x, (None,), 1 if loop > 1 else None),
            b.load(w, (1,), 0 if loop > 1 else None),
        )
        close: Callable[[Node], Node] = build.accum_sum if loop > 1 else lambda n: n
        power, product = close(build.sum(build.square(tx), 1)), close(build.matmul(tx, tw))
        root = build.sqrt(build.div(power, float(x.shape[1])))
        b.store(build.div(product, root), (1,))
        return make_graph(program.inputs, b.launch(), program.input_names, name="fused")

    return fused


def gated(grid: int, loop: int) -> Callable[[Graph], Graph]:
    """One kernel with two accumulators."""

    def fused(program: Graph) -> Graph:
        x, w1, w2 = program.inputs
        b = BlockBuilder((grid,), loop)
        f = 0 if loop > 1 else None
        tx = b.load(x, (None,), 1 if loop > 1 else None)
        t1, t2 = b.load(w1, (1,), f), b.load(w2, (1,), f)
        close: Callable[[Node], Node] = build.accum_sum if loop > 1 else lambda n: n
        gate, up = close(build.matmul(tx, t1)), close(build.matmul(tx, t2))
        b.store(build.mul(composite.silu(gate), up), (1,))
        return make_graph(program.inputs, b.launch(), program.input_names, name="fused")

    return fused


def lora(grid: int) -> Callable[[Graph], Graph]:
    """One kernel with three products."""

    def fused(program: Graph) -> Graph:
        x, w, a, b_ = program.inputs
        b = BlockBuilder((grid,))
        tx, tw, ta, tb = b.load(x, (None,)), b.load(w, (1,)), b.load(a, (None,)), b.load(b_, (1,))
        b.store(build.add(build.matmul(tx, tw), build.matmul(build.matmul(tx, ta), tb)), (1,))
        return make_graph(program.inputs, b.launch(), program.input_names, name="fused")

    return fused


def ntrans(grid: int) -> Callable[[Graph], Graph]:
    """One kernel over rows."""

    def fused(program: Graph) -> Graph:
        h, x, alpha = program.inputs
        b = BlockBuilder((grid,))
        th, tx, ta = (b.load(n, (0,)) for n in (h, x, alpha))
        inner = build.add(tx, build.mul(ta, build.add(composite.rms_norm(th), tx)))
        b.store(composite.rms_norm(inner), (0,))
        return make_graph(program.inputs, b.launch(), program.input_names, name="fused")

    return fused


def moe(grid: int, loop: int = 1) -> Callable[[Graph], Graph]:
    """Two kernels, experts by columns; exp in the first."""

    def fused(program: Graph) -> Graph:
        x, a, w = program.inputs
        b = BlockBuilder((x.shape[0], grid), loop)
        f = loop > 1
        tx, ta = b.load(x, (0, None), 2 if f else None), b.load(a, (0, 2), 1 if f else None)
        product = build.matmul(tx, ta)
        b.store(build.exp(build.accum_sum(product) if f else product), (0, 2))
        (h,) = b.launch()
        b = BlockBuilder((x.shape[0], grid), loop)
        th, tw = b.load(h, (0, None), 2 if f else None), b.load(w, (0, 2), 1 if f else None)
        product = build.matmul(th, tw)
        b.store(build.accum_sum(product) if f else product, (0, 2))
        return make_graph(program.inputs, b.launch(), program.input_names, name="fused")

    return fused


FUSED: dict[str, dict[str, Callable[[Graph], Graph]]] = {
    "gqa": {"fused 2x4/16": attention((2, 4), 16), "fused 2x2/32": attention((2, 2), 32)},
    "mha": {"fused 32x1/8": attention((32, 1), 8), "fused 32x1/16": attention((32, 1), 16)},
    "mqa": {"fused 1x8/16": attention((1, 8), 16), "fused 1x16/16": attention((1, 16), 16)},
    "qknorm": {"fused 2x4/16": attention((2, 4), 16, True)},
    "rmsnorm": {"fused 12/1": rmsnorm(12, 1), "fused 24/8": rmsnorm(24, 8)},
    "lora": {"fused 8": lora(8), "fused 2": lora(2)},
    "gated_mlp": {"fused 8/1": gated(8, 1), "fused 32/8": gated(32, 8)},
    "ntrans": {"fused 8": ntrans(8), "fused 2": ntrans(2)},
    "moe": {"fused 8x4": moe(4), "fused 8x4/8": moe(4, 8)},
}


def library_call(graph: Graph, arrays: Sequence[Any], threads: int, options: CpuOptions) -> Call:
    """A call of the generated code, outputs allocated once."""
    module = lower_cpu(graph, host(), options)
    library = Library(compile_c(module.source).path, module.scratch_bytes)
    outputs = [np.empty(o.shape, o.dtype.numpy) for o in graph.outputs]
    ins, outs = [a.ctypes.data for a in arrays], [o.ctypes.data for o in outputs]

    def call() -> Any:
        library.call(ins, outs, threads)
        return outputs[0]

    return call


def race(calls: dict[str, Call], seconds: float) -> dict[str, list[float]]:
    """Times of every call, in rounds of rotating order."""
    times: dict[str, list[float]] = {n: [] for n in calls}
    for call in calls.values():
        call()
    names, turn = list(calls), 0
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or turn < 5:
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start = time.perf_counter()
            calls[name]()
            once = time.perf_counter() - start
            repeat = min(20, max(1, int(0.002 / max(once, 1e-7))))
            start = time.perf_counter()
            for _ in range(repeat):
                calls[name]()
            times[name].append((time.perf_counter() - start) / repeat)
        turn += 1
    return times


def show(title: str, times: dict[str, list[float]], ours: Sequence[str]) -> float:
    """Print a table; returns (best library) / (best of ours)."""
    print(f"{title}")
    middle: dict[str, float] = {}
    for name, t in times.items():
        q = statistics.quantiles(t, n=4)
        middle[name] = statistics.median(t)
        print(
            f"  {name:22s} median {middle[name] * 1e6:9.1f} us   least {min(t) * 1e6:9.1f}   "
            f"middle half {q[0] * 1e6:9.1f} .. {q[2] * 1e6:9.1f}   ({len(t)})"
        )
    best = min(v for n, v in middle.items() if n not in ours)
    mine = min(v for n, v in middle.items() if n in ours)
    print(f"  ratio {best / mine:.3f} (medians)")
    return best / mine


def program_race(name: str, args: argparse.Namespace) -> float:
    """One named program."""
    import torch

    torch.set_num_threads(args.threads)
    program = PROGRAMS[name]
    graph = program.graph(1)
    rng = np.random.default_rng(0)
    arrays = [(rng.standard_normal(n.shape) * 0.1).astype(np.float32) for n in graph.inputs]
    tensors = [torch.from_numpy(a) for a in arrays]
    calls: dict[str, Call] = {
        "numpy": lambda: program.numpy(np, *arrays),
        "torch": lambda: program.torch(torch, *tensors),
    }
    if program.sdpa is not None:
        calls["torch.sdpa"] = lambda: program.sdpa(torch, *tensors)
    if args.compile:
        fast = torch.compile(lambda *t: program.torch(torch, *t), dynamic=False)
        calls["torch.compile"] = lambda: fast(*tensors)
    ours = {"op_by_op": graph, **{k: f(graph) for k, f in FUSED.get(name, {}).items()}}
    for label, g in ours.items():
        calls[label] = library_call(g, arrays, args.threads, CpuOptions())
    expected = program.numpy(np, *(a.astype(np.float64) for a in arrays))
    with torch.no_grad():
        for label in ours:
            got = calls[label]()
            error = float(np.max(np.abs(got - expected)) / np.max(np.abs(expected)))
            assert error < 1e-4, (name, label, error)
        return show(name, race(calls, args.seconds), list(ours))


def square_race(args: argparse.Namespace, n: int = 512) -> float:
    """A product of square matrices: the default lowering, a block graph with a loop, numpy."""
    from threadpoolctl import threadpool_limits

    g = KernelGraph("square")
    a, b = g.input((n, n)), g.input((n, n))
    g.output(g.matmul(a, b))
    plain = g.freeze()
    builder = BlockBuilder((4, 2), 2)
    ta, tb = builder.load(a, (0, None), 1), builder.load(b, (None, 1), 0)
    builder.store(build.accum_sum(build.matmul(ta, tb)), (0, 1))
    tiled = make_graph(plain.inputs, builder.launch())
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((n, n)).astype(np.float32) for _ in range(2)]
    out = np.empty((n, n), np.float32)
    with threadpool_limits(args.threads):
        calls: dict[str, Call] = {"numpy": lambda: np.matmul(*arrays, out=out)}
        calls["default"] = library_call(plain, arrays, args.threads, CpuOptions())
        calls["block 4x2/2"] = library_call(tiled, arrays, args.threads, CpuOptions())
        times = race(calls, args.seconds)
    for label, t in times.items():
        print(f"  {label}: {2 * n**3 / statistics.median(t) / 1e9:.1f} GFLOP/s")
    return show(f"{n}^3, {args.threads} threads", times, ["default", "block 4x2/2"])


def main() -> None:
    """Run the races that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("programs", nargs="*", default=[])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--compile", action="store_true", help="race torch.compile too")
    parser.add_argument("--square", action="store_true", help="race a 512^3 product")
    args = parser.parse_args()
    ratios = {}
    if args.square:
        ratios["square"] = square_race(args)
    for name in args.programs or ([] if args.square else PUBLISHED):
        ratios[name] = program_race(name, args)
    print("\n".join(f"{n:12s} {r:.3f}" for n, r in ratios.items()))
    print(f"geometric mean {statistics.geometric_mean(ratios.values()):.3f}")


if __name__ == "__main__":
    main()
