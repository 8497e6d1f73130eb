"""Obelisk: superoptimizes tensor programs, proves what it returns, and runs it.

    import obelisk as ob
    g = ob.KernelGraph()
    q, k, v = (g.input(s, ob.f32) for s in ((2, 256, 64), (2, 64, 4096), (2, 4096, 64)))
    e = g.exp(g.matmul(q, k))
    g.output(g.matmul(g.div(e, g.sum(e, 2)), v))
    best = ob.optimize(g)
    y = best(*arrays)  # numpy arrays or torch tensors

Importing it needs no compiler, no GPU and no optional package, and costs next to nothing: names are
looked up when they are first used. The stages are functions of their packages, for use alone:
`obelisk.search.search`, `obelisk.verify.verify`, `obelisk.lower.cpu.lower_cpu`, and so on.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from obelisk.app.compiled import Compiled, load
    from obelisk.app.family import Family, family, jit
    from obelisk.app.loading import load_program
    from obelisk.app.pipeline import optimize
    from obelisk.app.report import Report
    from obelisk.app.sized import CompiledFamily, optimize_family
    from obelisk.base.errors import (
        BuildFailed,
        CallError,
        DTypeError,
        Infeasible,
        InternalError,
        MalformedGraph,
        MissingDependency,
        ObeliskError,
        ParseError,
        ShapeError,
        UnknownName,
        UserError,
    )
    from obelisk.ir import (
        BlockBuilder,
        DType,
        Graph,
        KernelGraph,
        Node,
        Precision,
        random_inputs,
        run,
    )
    from obelisk.ir.family import Dim, FamilyGraph
    from obelisk.verify import Verdict, VerdictKind

    f64, f32, f16, bf16, f8e4m3 = DType.F64, DType.F32, DType.F16, DType.BF16, DType.F8E4M3
    i32, i8, i4, bool_ = DType.I32, DType.I8, DType.I4, DType.BOOL
    __version__: str

_HOMES = {
    "obelisk.app.compiled": ("Compiled", "load"),
    "obelisk.app.family": ("Family", "family", "jit"),
    "obelisk.app.loading": ("load_program",),
    "obelisk.app.pipeline": ("optimize",),
    "obelisk.app.report": ("Report",),
    "obelisk.app.sized": ("CompiledFamily", "optimize_family"),
    "obelisk.base.errors": (
        "BuildFailed", "CallError", "DTypeError", "Infeasible", "InternalError", "MalformedGraph",
        "MissingDependency", "ObeliskError", "ParseError", "ShapeError", "UnknownName", "UserError",
    ),
    "obelisk.ir": (
        "BlockBuilder", "DType", "Graph", "KernelGraph", "Node", "Precision", "random_inputs",
        "run",
    ),
    "obelisk.ir.family": ("Dim", "FamilyGraph"),
    "obelisk.verify": ("Verdict", "VerdictKind"),
}  # fmt: skip
_DTYPES = {
    "f64": "F64", "f32": "F32", "f16": "F16", "bf16": "BF16", "f8e4m3": "F8E4M3", "i32": "I32",
    "i8": "I8", "i4": "I4", "bool_": "BOOL",
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "BlockBuilder",
    "BuildFailed",
    "CallError",
    "Compiled",
    "CompiledFamily",
    "DType",
    "DTypeError",
    "Dim",
    "Family",
    "FamilyGraph",
    "Graph",
    "Infeasible",
    "InternalError",
    "KernelGraph",
    "MalformedGraph",
    "MissingDependency",
    "Node",
    "ObeliskError",
    "ParseError",
    "Precision",
    "Report",
    "ShapeError",
    "UnknownName",
    "UserError",
    "Verdict",
    "VerdictKind",
    "bf16",
    "bool_",
    "f8e4m3",
    "f16",
    "f32",
    "f64",
    "family",
    "i4",
    "i8",
    "i32",
    "jit",
    "load",
    "load_program",
    "optimize",
    "optimize_family",
    "random_inputs",
    "run",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """A public name, from the module it lives in."""
    if name == "__version__":
        return import_module("obelisk.app.doctor").obelisk_version()
    if name in _DTYPES:
        return import_module("obelisk.ir").DType[_DTYPES[name]]
    if name not in _HOME_OF:
        raise AttributeError(f"module 'obelisk' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
