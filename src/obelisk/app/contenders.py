"""What Obelisk is compared with: the same program in numpy and torch, timed side by side with it.

Gives the `Contender`s of a program for `tune`, whose worker calls the factories below. A named
program runs in each library's own idiom (`programs.py`), another one operator by operator
(`translate.py`). It promises that a missing library is said to be missing, never silently left out.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from obelisk.app.programs import PROGRAMS, program_of
from obelisk.app.translate import as_numpy, as_torch
from obelisk.ir import Graph, Op
from obelisk.ir.jsonform import from_json, to_json
from obelisk.tune import Contender, Setup

Call = Callable[[], Any]
START_LIMIT = 60.0  # seconds for a library to be imported and to answer once
COMPILE_LIMIT = 180.0  # seconds for torch.compile to compile a program

NUMPY, EAGER, COMPILED, SDPA = "numpy", "torch", "torch.compile", "torch.sdpa"
ALL = (NUMPY, EAGER, COMPILED, SDPA)
QUICK = (NUMPY, EAGER)  # what `optimize` compares with; the rest is for `bench`


def contenders(
    graph: Graph, names: Sequence[str] = QUICK, start_seconds: float = START_LIMIT
) -> tuple[list[Contender], dict[str, str]]:
    """The contenders called `names` for a program, and for those that cannot be: why.

    `start_seconds` limits how long one may take to start (torch.compile has its own limit).
    """
    program = program_of(graph)
    payload: Any = program.name if program else to_json(graph)
    absent: dict[str, str] = {}
    found: list[Contender] = []
    plain = all(n.op is not Op.BLOCK for n in graph.nodes)
    for name in names:
        if name != NUMPY and importlib.util.find_spec("torch") is None:
            absent[name] = "torch is not installed (pip install obelisk[torch])"
        elif not plain:
            absent[name] = "the program has graph-defined kernels"
        elif name == SDPA and (program is None or program.sdpa is None):
            absent[name] = "not an attention that the call covers"
        else:
            found.append(_contender(name, payload, start_seconds))
    return found, absent


def _contender(name: str, payload: Any, limit: float) -> Contender:
    match name:
        case "numpy":
            return Contender(name, numpy_calls, payload, limit)
        case "torch":
            return Contender(name, torch_calls, payload, limit)
        case "torch.compile":
            return Contender(name, compiled_calls, payload, COMPILE_LIMIT)
        case _:
            return Contender(name, sdpa_calls, payload, limit)


def numpy_calls(setup: Setup) -> list[Call]:
    """numpy, as a user would write it."""
    if isinstance(setup.payload, str):
        idiom = PROGRAMS[setup.payload].numpy
        return [partial(idiom, np, *arrays) for arrays in setup.copies]
    call = as_numpy(from_json(setup.payload))
    return [partial(call, *arrays) for arrays in setup.copies]


def torch_calls(setup: Setup) -> list[Call]:
    """torch, eagerly, without gradients."""
    return _torch(setup, lambda torch, f: f)


def compiled_calls(setup: Setup) -> list[Call]:
    """torch.compile with static shapes."""
    return _torch(setup, lambda torch, f: torch.compile(f, dynamic=False, fullgraph=True))


def sdpa_calls(setup: Setup) -> list[Call]:
    """torch's fused attention."""
    return _torch(setup, lambda torch, f: f, sdpa=True)


def _torch(setup: Setup, wrap: Callable[[Any, Any], Any], sdpa: bool = False) -> list[Call]:
    import torch  # only the worker that times it needs it

    torch.set_num_threads(setup.threads)
    if isinstance(setup.payload, str):
        program = PROGRAMS[setup.payload]
        idiom = program.sdpa if sdpa and program.sdpa else program.torch
        plain: Any = partial(idiom, torch)
    else:
        plain = as_torch(from_json(setup.payload), torch)
    call = wrap(torch, plain)

    def run(tensors: Sequence[Any]) -> Any:
        with torch.inference_mode():
            return call(*tensors)

    return [partial(run, [_tensor(torch, a) for a in arrays]) for arrays in setup.copies]


def _tensor(torch: Any, array: np.ndarray[Any, Any]) -> Any:
    """A tensor on the array's memory; types that numpy lacks go through a view of equal width."""
    name = array.dtype.name
    if array.dtype.kind in "fib" and name in (
        "float64",
        "float32",
        "float16",
        "int32",
        "int8",
        "bool",
    ):
        return torch.from_numpy(array)
    bits = {1: np.uint8, 2: np.int16}[array.dtype.itemsize]
    return torch.from_numpy(array.view(bits)).view(getattr(torch, name))
