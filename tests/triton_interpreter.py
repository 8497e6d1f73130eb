"""Lowered Triton kernels in Triton's interpreter, on the CPU.

`python -m tests.triton_interpreter SET` runs one set of graphs in a process of its own, since the
interpreter is chosen before Triton is imported; prints a line of JSON for each graph: its name and
the worst error in units of what is allowed (above 1 it is wrong), or why there is no kernel.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from obelisk.base.errors import Infeasible
from obelisk.ir import DType, Graph, KernelGraph, Precision, random_inputs, run
from obelisk.ir.resize import blocks_of
from obelisk.lower.cuda.options import Place
from obelisk.lower.triton import TritonKernel, TritonModule, TritonOptions, lower_triton, variants
from obelisk.machine import find
from tests import strategies
from tests.cuda_graphs import attention, fused, gated, low_rank, norm_matmul
from tests.fuzz_graphs import random_program, worst_error
from tests.lowering import RELATIVE, largest_error, strided

GUARD = 64  # bytes around each output that must stay as they were
FILLER = 0xAB


class Interpreter:
    """Runs modules; keeps the kernels it has loaded."""

    def __init__(self, folder: Path) -> None:
        assert os.environ.get("TRITON_INTERPRET") == "1"
        import torch

        self.torch: Any = torch
        self.folder = folder
        self.loaded: dict[str, Any] = {}
        self.types = {
            DType.F64: torch.float64, DType.F32: torch.float32, DType.F16: torch.float16,
            DType.BF16: torch.bfloat16, DType.F8E4M3: torch.uint8, DType.I32: torch.int32,
            DType.I8: torch.int8, DType.BOOL: torch.uint8,
        }  # fmt: skip

    def function(self, kernel: TritonKernel) -> Any:
        """The decorated function of a kernel's text."""
        if kernel.source not in self.loaded:
            path = self.folder / f"kernel_{len(self.loaded)}.py"
            path.write_text(kernel.source)
            spec = importlib.util.spec_from_file_location(path.stem, path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            self.loaded[kernel.source] = getattr(module, kernel.entry)
        return self.loaded[kernel.source]

    def typed(self, memory: Any, offset: int, dtype: DType) -> Any:
        """Memory from byte `offset` on as elements."""
        size = int(dtype.nbytes)
        whole = (len(memory) - offset) // size * size
        return memory[offset : offset + whole].view(self.types[dtype])

    def run(self, module: TritonModule, graph: Graph, arrays: Sequence[Any]) -> list[Any]:
        """The outputs; checks that nothing around them changed."""
        torch = self.torch
        inputs = []
        for a, node in zip(arrays, graph.inputs, strict=True):
            laid = strided(a, node.attrs.strides)
            span = 1 + sum(
                (n - 1) * (s // laid.itemsize)
                for n, s in zip(laid.shape, laid.strides, strict=True)
            )
            flat = np.lib.stride_tricks.as_strided(laid, (span,), (laid.itemsize,))
            inputs.append(torch.from_numpy(flat.copy().view(np.uint8)))
        sizes = [int(o.elements * o.dtype.nbytes) for o in graph.outputs]
        outputs = [torch.full((n + 2 * GUARD,), FILLER, dtype=torch.uint8) for n in sizes]
        scratch = torch.full((module.scratch_bytes + GUARD,), FILLER, dtype=torch.uint8)
        for launch in module.launches:
            kernel = module.kernels[launch.kernel]
            arguments = []
            for p, dtype in zip(launch.arguments, kernel.pointers, strict=True):
                match p.place:
                    case Place.INPUT:
                        arguments.append(self.typed(inputs[p.index], p.offset, dtype))
                    case Place.OUTPUT:
                        arguments.append(self.typed(outputs[p.index], p.offset + GUARD, dtype))
                    case _:
                        arguments.append(self.typed(scratch, p.offset, dtype))
            self.function(kernel)[(kernel.blocks,)](*arguments)
        got = []
        for node, memory, n in zip(graph.outputs, outputs, sizes, strict=True):
            host = memory.numpy()
            assert (host[:GUARD] == FILLER).all(), "wrote before an output"
            assert (host[GUARD + n :] == FILLER).all(), "wrote past an output"
            got.append(host[GUARD : GUARD + n].copy().view(node.dtype.numpy).reshape(node.shape))
        return got


def error_of(got: Sequence[Any], graph: Graph, arrays: Sequence[Any]) -> float:
    """The worst error of all outputs against float64, in units of what is allowed."""
    exact, working = run(graph, list(arrays)), run(graph, list(arrays), Precision.WORKING)
    worst = 0.0
    for g, e, w, node in zip(got, exact, working, graph.outputs, strict=True):
        if node.dtype is DType.F8E4M3:
            worst = max(worst, largest_error(g, w) / RELATIVE[node.dtype])
            continue
        if not node.dtype.is_float:  # integers wrap as their type does, in both
            e = w
        worst = max(worst, worst_error(g, e, w, node.dtype))
    return worst


def whole_error(got: Any, want: Any) -> float:
    """The relative error of an output vector, in units of what is allowed; infinite where an
    element is not finite.
    """
    limit = 2e-3 if got.dtype == DType.F16.numpy else 1.2e-2
    g = np.asarray(got, np.float64)
    if not np.isfinite(g).all():
        return float("inf")
    return float(np.linalg.norm(g - want) / np.linalg.norm(want)) / limit


# --- sets of graphs -------------------------------------------------------------------------------

SMALLER = {4096: 48, 6144: 72, 256: 24, 1024: 40, 32: 4}


def small_program(name: str, dtype: str) -> Graph:
    """A named program at small, awkward sizes."""
    from obelisk.app.programs import PROGRAMS

    program = PROGRAMS[name]
    g = KernelGraph(name)
    inputs = [
        g.input([SMALLER.get(n, n) for n in shape], dtype, name=label)
        for label, shape in program.shapes.items()
    ]
    g.output(program.build(g, *inputs), name="out")
    return g.freeze()


def programs() -> Iterator[Graph]:
    """Every named program."""
    from obelisk.app.programs import PROGRAMS

    for name in PROGRAMS:
        for dtype in ("f16", "f32"):
            yield small_program(name, dtype)


MOST_BLOCKS = 64  # the interpreter takes some 10 ms for a block


def most_blocks(graph: Graph) -> int:
    """Blocks of the largest grid."""
    return max((b.blocks for b in blocks_of(graph)), default=0)


def found() -> Iterator[Graph]:
    """Candidates that the search returns for small programs, the best few of each."""
    from obelisk.search import Budget, search

    for name in ("gqa", "rmsnorm", "lora", "attention"):
        graph = small_program(name, "f16")
        found = search(graph, find("h200"), budget=Budget(seconds=30.0, states=1500))
        few = (c.graph for c in found.candidates[1:] if most_blocks(c.graph) <= MOST_BLOCKS)
        yield from itertools.islice(few, 3)


def blocks() -> Iterator[Graph]:
    """Every feature of the block level, on extents that do not divide; random block graphs."""
    from tests.e2e.test_lower_blocks import cases

    yield from cases()
    for graph in fused().values():
        if sum(n.elements for n in graph.inputs) < 200_000:
            yield graph
    # Tiles with a long depth, whose products have a loop of their own; inside the block's loop too.
    yield low_rank(3, 300, 12, 88, parts=2)
    yield gated(5, 694, 77, parts=2, loop=2)
    yield norm_matmul(4, 347, 48, parts=3, split=1, tile=347)
    yield from (strategies.blocked_pair(i).candidate for i in range(16))
    for i in range(10):
        graph = strategies.block_zoo(i)
        if all(n.dtype is not DType.I4 for n in graph.inputs):
            yield graph


def repeated() -> Graph:
    """Folds and products along dims of one element repeated, which overhang their tiles."""
    g = KernelGraph("repeated")
    x, y = g.input((129,), "f16", strides=(0,)), g.input((5, 77), strides=(1, 0))
    w, z = g.input((77, 20), strides=(0, 1)), g.input((5, 77))
    h, v = g.input((24, 77), "f16", strides=(1, 0)), g.input((77, 33), "f16")
    g.output(g.sum(x, 0), g.reduce_max(x, 0), g.sum(g.exp(y), 1), g.sum(y, 1, 7))
    g.output(g.matmul(y, w), g.matmul(z, w), g.matmul(h, v))
    return g.freeze()


def operators() -> Iterator[Graph]:
    """Every operator alone, in every dtype."""
    from tests.e2e import test_lower_operators as ops

    for shape in ((3, 77), (1, 1)):
        yield from (make(shape) for make in (ops.elementwise, ops.reductions, ops.structure))
    yield from (ops.narrow(d) for d in ("f64", "f16", "bf16", "f8e4m3"))
    yield from (ops.integers(d) for d in ("i8", "i32"))
    yield ops.composites()
    yield repeated()
    yield from ops.products()


def choices() -> Iterator[tuple[Graph, TritonOptions]]:
    """Fused graphs with every lowering choice."""
    graphs = fused()
    for name in ("attention short", "gated odd", "low rank odd", "norm matmul"):
        for options in variants(graphs[name], find("h200"))[1:]:
            yield graphs[name], options


def rows_of_scores() -> Iterator[Graph]:
    """Attention of short lengths, in one kernel and split, f16 and bf16."""
    for dtype in (DType.F16, DType.BF16):
        for keys in (1, 17, 63, 64, 65):
            yield attention(1, 5, keys, 16, row_tile=5, split=1, key_tile=keys, dtype=dtype)
            if keys > 1:
                yield attention(1, 5, keys, 16, row_tile=5, split=1, key_tile=32, dtype=dtype)
        yield attention(1, 5, 64, 16, row_tile=5, split=2, key_tile=16, dtype=dtype)


def scored(graph: Graph, peak: float) -> list[Any]:
    """Inputs whose largest score is about `peak`."""
    q, k, v = random_inputs(graph, 2)
    kind = q.dtype
    largest = np.abs(q.astype(np.float64) @ k.astype(np.float64)).max()
    factor = np.sqrt(peak / largest)
    return [(q.astype(np.float64) * factor).astype(kind),
            (k.astype(np.float64) * factor).astype(kind), v]  # fmt: skip


PEAKS = (5.0, 11.0, 12.0, 50.0, 88.0, 100.0, 1000.0)
SETS: dict[str, Callable[[], Iterator[Graph]]] = {
    "programs": programs, "found": found, "blocks": blocks, "operators": operators,
    "scores": rows_of_scores,
}  # fmt: skip


def inputs_of(name: str, graph: Graph) -> Iterator[list[Any]]:
    """Arrays for a graph of a set."""
    if name == "scores":
        yield from (scored(graph, peak) for peak in PEAKS)
        return
    scale = 0.3 if name in ("programs", "found") else 1.0
    arrays = random_inputs(graph, 7, scale)
    # Where strides let elements share memory, the values are what memory then holds.
    yield [np.array(strided(a, n.attrs.strides)) for a, n in zip(arrays, graph.inputs, strict=True)]


def numbered(name: str) -> Iterator[tuple[Graph, TritonOptions]]:
    """The graphs of a set and how to lower them; random programs: `random:FIRST:COUNT`."""
    if name == "choices":
        yield from choices()
    elif name.startswith("random:"):
        _, first, count = name.split(":")
        for i in range(int(count)):
            yield random_program(int(first) + i), TritonOptions()
    else:
        for graph in SETS[name]():
            yield graph, TritonOptions()


def main(names: Sequence[str]) -> None:
    """Run sets; a graph that raises is a line too."""
    machine = find("h200")
    with tempfile.TemporaryDirectory() as folder:
        interpreter = Interpreter(Path(folder))
        for name in names:
            for i, (graph, options) in enumerate(numbered(name)):
                line: dict[str, Any] = {"set": name, "graph": f"{i} {graph.name}"}
                try:
                    module = lower_triton(graph, machine, options)
                    worst = 0.0
                    for arrays in inputs_of(name, graph):
                        got = interpreter.run(module, graph, arrays)
                        worst = max(worst, error_of(got, graph, arrays))
                        if name == "scores":
                            worst = max(worst, whole_error(got[0], run(graph, arrays)[0]))
                    line["error"] = worst
                except Infeasible as reason:
                    line["infeasible"] = str(reason)
                except Exception as error:
                    line["failed"] = f"{type(error).__name__}: {error}"[:800]
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
