"""CUDA C++ for a kernel of the tile program with its tiles in shared memory.

Takes any `Kernel`; gives a translation unit. Points of a chain are dealt to the threads of the
block, a fold with few results takes a warp a result, a product takes a thread an element, and a
barrier stands between statements that depend on each other. Works for every shape, stride and
dtype; it is the way out for what does not fit registers, not the fast way. Tiles that exceed shared
memory lie in device memory, one slice a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from math import prod

from obelisk.ir.block import Split
from obelisk.ir.dtype import DType
from obelisk.ir.op import Op
from obelisk.lower.cuda.names import (
    CTYPE,
    KIND_TYPE,
    convert,
    grid_lines,
    kind_of,
    literal,
    meeting_kind,
    operator,
    split_line,
    split_name,
)
from obelisk.lower.tile import (
    BufferKind,
    Chain,
    Extent,
    Kernel,
    Mode,
    Product,
    Scalar,
    Statement,
    View,
    Write,
    reads_of,
    writes_of,
)

WARP = 32


def runtime(*names: str) -> str:
    """The text of files of the fixed header library."""
    folder = files("obelisk.lower.cuda").joinpath("runtime")
    return "\n".join(folder.joinpath(n).read_text(encoding="utf-8") for n in names)


def _extent(e: Extent) -> str:
    return str(e.size) if e.split is None else split_name(e.split)


def splits_of(kernel: Kernel) -> list[Split]:
    """The cuts with short tiles that a kernel meets, in a fixed order."""
    found: set[Split] = set()
    for s in (*kernel.before, *kernel.body, *kernel.after):
        extents = s.dims if isinstance(s, Chain) else (*s.a.shape, *s.b.shape, *s.c.shape)
        found |= {e.split for e in extents if e.split is not None}
    return sorted(found, key=lambda s: (s.full, -1 if s.axis is None else s.axis, s.loop))


@dataclass(frozen=True, slots=True)
class Style:
    """Threads of a block, and whether tiles lie in device memory."""

    threads: int
    spilled: bool


class _Emitter:
    """Prints one kernel."""

    def __init__(self, kernel: Kernel, style: Style) -> None:
        self.kernel, self.style = kernel, style
        self.lines: list[str] = []
        self.depth = 0

    def line(self, text: str) -> None:
        self.lines.append("  " * self.depth + text)

    def open(self, text: str = "") -> None:
        self.line(f"{text} {{" if text else "{")
        self.depth += 1

    def close(self) -> None:
        self.depth -= 1
        self.line("}")

    def pointer(self, buffer: int, offset: int, moves: tuple[int, ...]) -> str:
        """The address of an access's first element for the current block and iteration."""
        b, kernel = self.kernel.buffers[buffer], self.kernel
        parts = [str(offset)] if offset else []
        for a, step in enumerate(moves[: len(kernel.grid)]):
            if step and kernel.grid[a] > 1:
                parts.append(f"g{a} * {step}ll")
        if moves and moves[-1] and kernel.loop > 1:
            parts.append(f"it * {moves[-1]}ll")
        base = b.name
        if b.kind is BufferKind.TILE:
            base = f"({CTYPE[b.dtype]} *)(arena + {kernel.offsets[buffer]})"
        return " + ".join([base, *parts])

    # ---- chains

    def scalar(self, chain: Chain, v: int) -> str:
        """The expression of value `v` of a chain."""
        s: Scalar = chain.code[v]
        code = chain.code
        want = kind_of(s.dtype)

        def arg(n: int, kind: str) -> str:
            t = code[n]
            if t.op is Op.CONST:
                return literal(t.value, kind)
            return convert(f"v{n}", kind_of(t.dtype), kind)

        if s.op is Op.ELEM:
            access = chain.reads[s.place]
            text = f"x{s.place}[{self.index(access.strides)}]"
            text = f"ob_{want}({text})"
            if s.dtype is DType.I8 and self.kernel.buffers[access.buffer].dtype is DType.I32:
                text = f"ob_wrap8({text})"
            return text
        if s.op is Op.IOTA:
            return f"i{s.place}"
        if s.op is Op.CAST:
            text = arg(s.args[0], want)
        else:
            picked = s.args[1:] if s.op is Op.WHERE else s.args
            operands = [
                (code[a].dtype, code[a].value if code[a].op is Op.CONST else None) for a in picked
            ]
            kind = meeting_kind(operands, "f" if s.op is Op.LESS else want)
            texts = [arg(a, kind) for a in picked]
            if s.op is Op.WHERE:
                texts.insert(0, arg(s.args[0], "m"))
            have = "m" if s.op is Op.LESS else kind
            text = convert(operator(s.op, texts), have, want)
        return f"ob_wrap8({text})" if s.dtype is DType.I8 else text

    def index(self, strides: tuple[int, ...]) -> str:
        """The element index of an access at the current point."""
        parts = []
        for d, s in enumerate(strides):
            if s:
                wide = abs(s) * 4096 > 2**31
                parts.append(f"i{d}" if s == 1 else f"i{d} * {s}{'ll' if wide else ''}")
        return " + ".join(parts) or "0"

    def chain(self, chain: Chain) -> None:
        kernel = self.kernel
        self.open("if (it > 0)" if chain.skip_first and kernel.loop > 1 else "")
        if chain.skip_first and kernel.loop == 1:
            self.close()
            return
        for n, r in enumerate(chain.reads):
            ctype = CTYPE[kernel.buffers[r.buffer].dtype]
            self.line(f"const {ctype} *x{n} = {self.pointer(r.buffer, r.offset, r.moves)};")
        for n, w in enumerate(chain.writes):
            a = w.access
            ctype = CTYPE[kernel.buffers[a.buffer].dtype]
            self.line(f"{ctype} *y{n} = {self.pointer(a.buffer, a.offset, a.moves)};")
        folds = [w for w in chain.writes if w.fold is not None]
        order = [d for d in range(len(chain.dims)) if d != chain.axis or not folds]
        if chain.vector in order:
            order.remove(chain.vector)
            order.append(chain.vector)
        points = prod(chain.dims[d].size for d in order)
        by_warp = bool(folds) and points * 2 < self.style.threads
        if by_warp:
            self.open(
                f"for (int p = thread / {WARP}; p < {points}; p += {self.style.threads // WARP})"
            )
        else:
            self.open(f"for (int p = thread; p < {points}; p += {self.style.threads})")
        self.decode(chain, order)
        for n, w in enumerate(chain.writes):
            if w.fold is not None:
                kind = self.write_kind(w)
                self.line(f"{KIND_TYPE[kind]} a{n} = {self.neutral(w, kind)};")
        if folds:
            assert chain.axis is not None
            axis = chain.axis
            start, step = (f"thread % {WARP}", WARP) if by_warp else ("0", 1)
            n_axis = _extent(chain.dims[axis])
            self.open(f"for (int i{axis} = {start}; i{axis} < {n_axis}; i{axis} += {step})")
            self.point(chain)
            self.close()
            for n, w in enumerate(chain.writes):
                if w.fold is None:
                    continue
                if by_warp:
                    fold = "ob_sum_fold" if w.fold is Op.SUM else "ob_max_fold"
                    self.line(f"a{n} = ob_warp_fold<{fold}>(a{n});")
            if by_warp:
                self.open(f"if (thread % {WARP} == 0)")
            for n, w in enumerate(chain.writes):
                if w.fold is not None:
                    self.put(n, w, f"a{n}")
            if by_warp:
                self.close()
        else:
            self.point(chain)
        self.close()
        self.close()

    def decode(self, chain: Chain, order: list[int]) -> None:
        """Indices of a point; points beyond a short tile are skipped."""
        step = 1
        for d in reversed(order):
            size = chain.dims[d].size
            text = "p" if step == 1 else f"p / {step}"
            if d != order[0]:
                text = f"{text} % {size}"
            self.line(f"const int i{d} = {text};")
            step *= size
        for d in order:
            if chain.dims[d].split is not None:
                self.line(f"if (i{d} >= {_extent(chain.dims[d])}) continue;")

    def write_kind(self, w: Write) -> str:
        return kind_of(self.kernel.buffers[w.access.buffer].dtype)

    def neutral(self, w: Write, kind: str) -> str:
        if w.fold is Op.SUM:
            return literal(0.0, kind)
        return literal(float("-inf") if kind in "fd" else -(2.0**31), kind)

    def combine(self, w: Write, a: str, b: str) -> str:
        add = w.fold is Op.SUM if w.fold is not None else w.mode is not Mode.MAX
        return f"{a} + {b}" if add else f"ob_max({a}, {b})"

    def point(self, chain: Chain) -> None:
        """All values at a point, and what is written there."""
        for v, s in enumerate(chain.code):
            if s.op is not Op.CONST:
                self.line(f"const {KIND_TYPE[kind_of(s.dtype)]} v{v} = {self.scalar(chain, v)};")
        for n, w in enumerate(chain.writes):
            kind = self.write_kind(w)
            s = chain.code[w.value]
            value = (
                literal(s.value, kind)
                if s.op is Op.CONST
                else convert(f"v{w.value}", kind_of(s.dtype), kind)
            )
            if w.fold is not None:
                self.line(f"a{n} = {self.combine(w, f'a{n}', value)};")
            else:
                self.put(n, w, value)

    def put(self, n: int, w: Write, value: str) -> None:
        """Write at the current point of the dims that the access has strides in."""
        kind = self.write_kind(w)
        at = f"y{n} + {self.index(w.access.strides)}"
        mode = w.mode
        if mode is Mode.ADD_AFTER_FIRST and self.kernel.loop == 1:
            mode = Mode.SET
        if mode is Mode.SET:
            self.line(f"ob_put({at}, {value});")
            return
        old = f"ob_{kind}(*({at}))"
        join = f"ob_max({old}, {value})" if mode is Mode.MAX else f"{old} + {value}"
        if mode is Mode.ADD_AFTER_FIRST:
            join = f"it > 0 ? {join} : {value}"
        self.line(f"ob_put({at}, {join});")

    # ---- products

    def product(self, s: Product) -> None:
        rank = len(s.c.shape)
        kind = kind_of(s.dtype)
        self.open()

        def base(v: View, name: str, const: str) -> None:
            ctype = CTYPE[self.kernel.buffers[v.buffer].dtype]
            self.line(f"{const}{ctype} *{name} = {self.pointer(v.buffer, v.offset, v.moves)};")

        base(s.a, "a", "const ")
        base(s.b, "b", "const ")
        base(s.c, "c", "")
        total = s.c.elements
        self.open(f"for (int p = thread; p < {total}; p += {self.style.threads})")
        step = 1
        for d in reversed(range(rank)):
            size = s.c.shape[d].size
            text = "p" if step == 1 else f"p / {step}"
            self.line(f"const int i{d} = {text if d == 0 else f'{text} % {size}'};")
            step *= size
        for d in range(rank):
            if s.c.shape[d].split is not None:
                self.line(f"if (i{d} >= {_extent(s.c.shape[d])}) continue;")
        sa = tuple(0 if d == rank - 1 else t for d, t in enumerate(s.a.strides))
        sb = tuple(0 if d == rank - 2 else t for d, t in enumerate(s.b.strides))
        self.line(f"const auto *ap = a + {self.index(sa)};")
        self.line(f"const auto *bp = b + {self.index(sb)};")
        self.line(f"{KIND_TYPE[kind]} sum = {literal(0.0, kind)};")
        depth = _extent(s.a.shape[-1])
        self.line("#pragma unroll 4")
        self.open(f"for (int k = 0; k < {depth}; k++)")
        ka, kb = s.a.strides[-1], s.b.strides[-2]
        self.line(
            f"sum += ob_{kind}(ap[(long long)k * {ka}]) * ob_{kind}(bp[(long long)k * {kb}]);"
        )
        self.close()
        at = f"c + {self.index(s.c.strides)}"
        if s.mode is Mode.ADD_AFTER_FIRST and self.kernel.loop > 1:
            self.line(f"if (it > 0) sum += ob_{kind}(*({at}));")
        self.line(f"ob_put({at}, sum);")
        self.close()
        self.close()

    # ---- the kernel

    def statements(self, part: tuple[Statement, ...], pending: set[int], read: set[int]) -> None:
        """Statements in order, a barrier before each that touches what others wrote or read since
        the last one.
        """
        for s in part:
            r, w = self.memory(reads_of(s)), self.memory(writes_of(s))
            if (r | w) & pending or w & read:
                self.line("__syncthreads();")
                pending.clear()
                read.clear()
            pending |= w
            read |= r
            if isinstance(s, Chain):
                self.chain(s)
            else:
                self.product(s)

    def memory(self, buffers: list[int]) -> set[int]:
        """Tiles that share bytes with these buffers (each block owns its part of a result)."""
        out: set[int] = set()
        k = self.kernel
        for b in buffers:
            out.add(b)
            if k.buffers[b].kind is not BufferKind.TILE:
                continue
            start = k.offsets[b]
            stop = start + int(k.buffers[b].elements * k.buffers[b].dtype.nbytes)
            for o, x in enumerate(k.buffers):
                if x.kind is BufferKind.TILE and k.offsets[o] < stop:
                    end = k.offsets[o] + int(x.elements * x.dtype.nbytes)
                    if start < end:
                        out.add(o)
        return out

    def run(self, entry: str) -> str:
        kernel = self.kernel
        params = []
        for b in kernel.buffers:
            if b.kind is BufferKind.PARAM:
                params.append(f"const {CTYPE[b.dtype]} *{b.name}")
            elif b.kind is BufferKind.RESULT:
                params.append(f"{CTYPE[b.dtype]} *{b.name}")
        if self.style.spilled:
            params.append("char *spill")
        self.line(f'extern "C" __global__ void __launch_bounds__({self.style.threads})')
        self.open(f"{entry}({', '.join(params)})")
        self.line("ob_begin();")
        self.line("const int thread = threadIdx.x;")
        self.line("const int block = blockIdx.x;")
        if self.style.spilled:
            self.line(f"char *const arena = spill + (long long)block * {spill_stride(kernel)};")
        elif kernel.arena:
            self.line("extern __shared__ __align__(16) char arena[];")
        self.lines += ["  " + x for x in grid_lines(kernel.grid, "block")]
        for s in splits_of(kernel):
            if not s.loop:
                self.line(split_line(s, kernel.grid, kernel.loop))
        pending: set[int] = set()
        read: set[int] = set()
        self.statements(kernel.before, pending, read)
        if kernel.body:
            if kernel.loop > 1:
                self.open(f"for (int it = 0; it < {kernel.loop}; it++)")
            else:
                self.open()
                self.line("const int it = 0;")
            for s in splits_of(kernel):
                if s.loop:
                    self.line(split_line(s, kernel.grid, kernel.loop))
            self.statements(kernel.body, pending, read)
            if kernel.loop > 1:
                self.line("__syncthreads();")
                pending.clear()
                read.clear()
            self.close()
        self.statements(kernel.after, pending, read)
        self.close()
        return "\n".join(self.lines)


def spill_stride(kernel: Kernel) -> int:
    """Bytes of a block's slice of device memory where its tiles do not fit in shared memory."""
    return -(-kernel.arena // 256) * 256


def emit_generic(kernel: Kernel, style: Style, entry: str) -> str:
    """A translation unit with one kernel. Deterministic."""
    head = (
        f"// Obelisk: grid {kernel.grid}, loop {kernel.loop}, {kernel.arena} bytes of tiles"
        f"{' in device memory' if style.spilled else ''}.\n"
    )
    return head + runtime("scalar.cuh") + "\n" + _Emitter(kernel, style).run(entry) + "\n"
