"""From what a user types to graphs: a program's name, a Python file, or a stored graph.

`load_program` gives exactly one program; `load_entries` gives every graph of a file (a checkpoint
list holds many). Both promise that a wrong request raises one of `base.errors` whose text names the
file, the place and the way out; an exception inside a user's own file is reported with its line.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from obelisk.app.backends import backend_of
from obelisk.app.programs import find_program
from obelisk.base.errors import MalformedGraph, ObeliskError, ParseError, UnknownName, UserError
from obelisk.ir import DType, Graph, KernelGraph, Node, parse_dtype
from obelisk.ir.files import Entry, read_graphs
from obelisk.machine import MachineKind, find


def load_program(
    spec: str, batch: int = 1, dtype: str | DType | None = None, like: Graph | None = None
) -> Graph:
    """The program that `spec` names: `gqa`, `model.py`, `model.py:block`, or a stored graph.

    `batch` and `dtype` reach a named program, and a function that has parameters of these names; a
    stored graph has its own and refuses others. A named program takes what is left open from
    `like`, a graph it will be compared with. Raises `UnknownName`, `ParseError`, `UserError`.
    """
    path, _, function = spec.partition(":") if ".py:" in spec else (spec, "", "")
    if path.endswith(".py"):
        return _from_python(Path(path), function, batch, dtype)
    if _is_file(spec):
        if batch != 1 or dtype is not None:
            raise UserError(f"{spec} is a stored graph: --batch and --dtype do not apply to it")
        entries = load_entries(spec)
        if len(entries) != 1:
            raise UserError(
                f"{spec} holds {len(entries)} graphs, one program is needed: choose one with "
                f"{spec}#INDEX, INDEX from 0 to {len(entries) - 1}"
            )
        return graph_of(entries[0])
    program = find_program(spec)
    if like is not None and like.inputs:
        batch = program.batch_of(like) if batch == 1 else batch
        dtype = dtype or like.inputs[0].dtype
    return program.graph(batch, dtype or DType.F32)


def load_for(spec: str, device: str, batch: int = 1, dtype: str | DType | None = None) -> Graph:
    """`load_program`, with the device's dtype for a named program unless one is asked for."""
    if dtype is None and ".py" not in Path(spec.partition(":")[0]).suffix and not _is_file(spec):
        dtype = backend_of(device).dtype
    return load_program(spec, batch, dtype)


def target_dtype(spec: str, target: str, dtype: str | DType | None) -> str | DType | None:
    """What a program gets for `target`, a device or a machine's name: the device's dtype for a
    named program, unless one is asked for.
    """
    if dtype is not None or ".py" in Path(spec.partition(":")[0]).suffix or _is_file(spec):
        return dtype
    word = target.partition(":")[0]
    known = word == "cuda" or find(word).kind is MachineKind.CUDA
    return backend_of("cuda").dtype if known else None


def load_entries(spec: str, batch: int = 1, dtype: str | DType | None = None) -> list[Entry]:
    """The graphs of `FILE`, of `FILE#INDEX` (one of them), or of anything `load_program` takes.

    An entry of a checkpoint that is malformed holds its error instead of a graph.
    """
    if not _is_file(spec) or ".py" in Path(spec.partition("#")[0]).suffix:
        return [Entry(0, load_program(spec, batch, dtype), None)]
    path, mark, index = spec.partition("#")
    if not Path(path).is_file():
        raise UserError(f"no such file: {path}")
    entries = read_graphs(path)
    if not mark:
        return entries
    if not index.isdigit() or int(index) >= len(entries):
        raise UserError(f"{path} has graphs 0 to {len(entries) - 1}, got #{index}")
    return [entries[int(index)]]


def graph_of(entry: Entry) -> Graph:
    """The entry's graph; raises its error if it is malformed."""
    if entry.graph is None:
        raise entry.error or MalformedGraph(f"graph {entry.index} is malformed")
    return entry.graph


def _is_file(spec: str) -> bool:
    """Whether `spec` names a file rather than a program: by a suffix, a slash, or its existence."""
    path = spec.partition("#")[0]
    return bool(Path(path).suffix) or "/" in path or Path(path).is_file()


def _from_python(path: Path, function: str, batch: int, dtype: str | DType | None) -> Graph:
    if not path.is_file():
        raise UserError(f"no such file: {path}")
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    try:
        code = compile(path.read_text(), str(path), "exec")
        exec(code, module.__dict__)  # running the user's file is what was asked for
    except SyntaxError as error:
        raise ParseError(f"{path}:{error.lineno}: {error.msg}") from error
    except Exception as error:
        raise _blame(path, error) from error
    chosen = _choose(path, module, function)
    given: dict[str, object] = {"batch": batch}
    if dtype is not None:
        given["dtype"] = parse_dtype(dtype)
    try:
        return _call(path, chosen, given)
    except ObeliskError as error:
        line = _line_of(path, error)
        if line:
            raise type(error)(f"{line}: {error}") from error
        raise
    except Exception as error:
        raise _blame(path, error) from error


def _line_of(path: Path, error: BaseException) -> str:
    """`file:line` of the innermost frame that lies in the user's file, or an empty text."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    return f"{path}:{frames[-1].lineno}" if frames else ""


def _blame(path: Path, error: Exception) -> UserError:
    return UserError(f"{_line_of(path, error) or path}: {type(error).__name__}: {error}")


def _choose(path: Path, module: ModuleType, function: str) -> Callable[..., Any]:
    """The function named, or the only public one, or the one called `program` or `build`."""
    own = {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__code__.co_filename == str(path)
        and not name.startswith("_")
    }
    if function:
        if function not in own:
            raise UnknownName(
                f"{path} has no function {function!r}: it has {', '.join(own) or 'none'}"
            )
        return own[function]
    if len(own) == 1:
        return next(iter(own.values()))
    for name in ("program", "build"):
        if name in own:
            return own[name]
    raise UnknownName(
        f"{path} has {len(own)} functions ({', '.join(own) or 'none'}): name the one that builds "
        f"the program as {path}:FUNCTION"
    )


def _call(path: Path, function: Callable[..., Any], given: dict[str, object]) -> Graph:
    """Call a builder; its first parameter is the graph, unless an option or with a default."""
    name = getattr(function, "__name__", "program")
    graph = KernelGraph(name)
    args: list[KernelGraph] = []
    options: dict[str, object] = {}
    for label, parameter in inspect.signature(function).parameters.items():
        if label in given:
            options[label] = given[label]
        elif parameter.default is inspect.Parameter.empty and parameter.kind in (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        ):
            if args or label == "dtype":
                raise UserError(
                    f"{path}: {name}() wants {label!r}: a program takes the KernelGraph and, if it "
                    "likes, batch and dtype; give the rest defaults"
                )
            args.append(graph)
    if given["batch"] != 1 and "batch" not in options:
        raise UserError(f"{path}: {name}() has no parameter batch, so --batch does not apply")
    if "dtype" in given and "dtype" not in options:
        raise UserError(f"{path}: {name}() has no parameter dtype, so --dtype does not apply")
    return as_graph(function(*args, **options), graph, f"{path}: {name}()")


def as_graph(result: object, graph: KernelGraph, where: str) -> Graph:
    """What a builder returned, or left in the graph it was given, as a frozen graph."""
    match result:
        case Graph():
            return result
        case KernelGraph():
            return result.freeze()
        case None:
            return graph.freeze()
        case Node():
            graph.output(result)
            return graph.freeze()
        case tuple() | list() if result and all(isinstance(r, Node) for r in result):
            graph.output(*result)
            return graph.freeze()
    raise MalformedGraph(
        f"{where} returned {type(result).__name__}: expected a graph, its results, or nothing"
    )
