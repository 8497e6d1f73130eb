"""A tile program as text for people: kernels, tiles and where they lie, statements, calls.

Takes a `TileProgram`, gives one string; the same program gives the same string. It is what
`obelisk show --lowered` prints.
"""

from __future__ import annotations

from obelisk.ir.op import Op
from obelisk.lower.tile import (
    Access,
    BufferKind,
    Chain,
    Extent,
    Kernel,
    Mode,
    Product,
    Scalar,
    Statement,
    TensorKind,
    TileProgram,
    View,
    Write,
    reads_of,
    writes_of,
)

_INFIX = {Op.ADD: "+", Op.SUB: "-", Op.MUL: "*", Op.DIV: "/", Op.LESS: "<"}
_MODE = {
    Mode.SET: "=",
    Mode.ADD: "+=",
    Mode.MAX: "max=",
    Mode.ADD_AFTER_FIRST: "+= after the first:",
}
_LONG = 120  # characters of an inlined expression before it gets a name of its own


def _extent(e: Extent) -> str:
    if e.split is None:
        return str(e.size)
    cut = "" if e.split.axis is None else f" by grid axis {e.split.axis}"
    return f"<={e.size} of {e.split.full}{cut}{' and the loop' if e.split.loop else ''}"


def _place(offset: int, moves: tuple[int, ...]) -> str:
    parts = [str(offset)] if offset else []
    for a, step in enumerate(moves):
        if step:
            parts.append(f"{step}*{'it' if a == len(moves) - 1 else f'g{a}'}")
    return " + ".join(parts)


def _access(kernel: Kernel, a: Access) -> str:
    steps = [f"i{d}*{s}" if s != 1 else f"i{d}" for d, s in enumerate(a.strides) if s]
    where = " + ".join([p for p in (_place(a.offset, a.moves),) if p] + steps)
    return f"{kernel.buffers[a.buffer].name}[{where}]"


def _view(kernel: Kernel, v: View) -> str:
    shape = ", ".join(_extent(e) for e in v.shape)
    where = _place(v.offset, v.moves)
    at = f" from {where}" if where else ""
    return f"{kernel.buffers[v.buffer].name}({shape}; strides {v.strides}{at})"


def _scalar(s: Scalar, names: list[str], reads: list[str]) -> str:
    args = [names[a] for a in s.args]
    match s.op:
        case Op.ELEM:
            return reads[s.place]
        case Op.CONST:
            return f"{s.value:g}"
        case Op.IOTA:
            return f"i{s.place}"
        case Op.CAST:
            return f"{s.dtype}({args[0]})"
    if s.op in _INFIX:
        return f"({args[0]} {_INFIX[s.op]} {args[1]})"
    return f"{s.op.value}({', '.join(args)})"


def _chain(kernel: Kernel, c: Chain) -> list[str]:
    dims = ", ".join(f"i{d} {_extent(e)}" for d, e in enumerate(c.dims))
    fold = "" if c.axis is None else f", folds i{c.axis}"
    first = ", not in iteration 0" if c.skip_first else ""
    lines = [f"chain over {dims} (vectors along i{c.vector}{fold}{first})"]
    uses = [0] * len(c.code)
    for s in c.code:
        for a in s.args:
            uses[a] += 1
    for w in c.writes:
        uses[w.value] += 1
    reads = [_access(kernel, r) for r in c.reads]
    names: list[str] = []
    for n, s in enumerate(c.code):
        text = _scalar(s, names, reads)
        if (uses[n] > 1 and s.op not in (Op.CONST, Op.ELEM, Op.IOTA)) or len(text) > _LONG:
            lines.append(f"  v{n} = {text}")
            text = f"v{n}"
        names.append(text)
    lines += [f"  {_write(kernel, w, names[w.value])}" for w in c.writes]
    return lines


def _write(kernel: Kernel, w: Write, value: str) -> str:
    folded = value if w.fold is None else f"{w.fold.value}({value})"
    return f"{_access(kernel, w.access)} {_MODE[w.mode]} {folded}"


def _product(kernel: Kernel, p: Product) -> list[str]:
    return [
        f"product in {p.dtype}",
        f"  {_view(kernel, p.c)} {_MODE[p.mode]}",
        f"    {_view(kernel, p.a)}",
        f"    @ {_view(kernel, p.b)}",
    ]


def _statement(kernel: Kernel, s: Statement) -> list[str]:
    return _chain(kernel, s) if isinstance(s, Chain) else _product(kernel, s)


def kernel_lines(kernel: Kernel) -> list[str]:
    """A kernel's buffers and where they lie, and its statements in order."""
    lines: list[str] = []
    used: set[int] = set()
    for s in (*kernel.before, *kernel.body, *kernel.after):
        used |= {*reads_of(s), *writes_of(s)}
    for i in sorted(used):
        b = kernel.buffers[i]
        if b.kind is BufferKind.TILE:
            lines.append(f"{b.name}: {b.dtype} tile of {b.elements} at {kernel.offsets[i]}")
        else:
            lines.append(f"{b.name}: {b.dtype} {b.kind.value} {b.index}")
    parts = (("before", kernel.before), ("each iteration", kernel.body), ("after", kernel.after))
    for title, part in parts:
        if part:
            lines.append(f"{title}:")
            for s in part:
                lines += ["  " + line for line in _statement(kernel, s)]
    return lines


def describe(program: TileProgram) -> str:
    """The whole program as text."""
    lines = [
        f"tile program {program.name} {program.digest}",
        f"{len(program.calls)} calls of {len(program.kernels)} kernels, {program.scratch} bytes "
        f"between kernels (at least {program.scratch_bound})",
    ]
    names: list[str] = []
    for i, t in enumerate(program.tensors):
        if t.kind is TensorKind.SCRATCH:
            names.append(f"scratch{i}")
            lines.append(f"scratch{i}: {t.dtype} of {t.elements} at {t.offset}")
        else:
            names.append(f"{t.kind.value}{t.index}")
    for call in program.calls:
        given = ", ".join(
            names[b.tensor] + (f"+{b.offset}" if b.offset else "") for b in call.params
        )
        made = ", ".join(names[b.tensor] for b in call.results)
        lines.append(f"{made} = kernel {call.kernel}({given})  # {call.origin}")
    for i, kernel in enumerate(program.kernels):
        head = (
            f"kernel {i}: grid {kernel.grid}, loop {kernel.loop}, tiles {kernel.arena} bytes "
            f"(at least {kernel.bound})"
        )
        lines += ["", head, *("  " + line for line in kernel_lines(kernel))]
    return "\n".join(lines) + "\n"
