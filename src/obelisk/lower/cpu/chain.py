"""C for a chain: one loop nest with explicit vectors.

The chain's vector dim is the innermost loop, the folded dim (where it is another one) the loop
around it. A value is computed in the outermost loop that knows all it depends on. Elements past a
whole number of vectors are done by one more pass over the same code with loads and stores of the
first n lanes, so no element outside a tile is touched.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isinf

import numpy as np

from obelisk.ir.dtype import DType
from obelisk.ir.op import Op
from obelisk.lower.cpu.names import CTYPE, extent, pointer
from obelisk.lower.cpu.options import CpuOptions
from obelisk.lower.tile import Buffer, Chain, Kernel, Mode, Scalar, Write

_ARITH = {Op.ADD: "+", Op.SUB: "-", Op.MUL: "*", Op.DIV: "/"}
_CONVERT = {  # (from, to): an expression over {0}
    ("f", "d"): "ob_fd({0})",
    ("d", "f"): "ob_df({0})",
    ("i", "f"): "ob_if({0})",
    ("i", "d"): "ob_id({0})",
    ("f", "i"): "ob_fi({0})",
    ("d", "i"): "ob_di({0})",
    ("m", "i"): "ob_mi({0})",
    ("m", "f"): "ob_if(ob_mi({0}))",
    ("m", "d"): "ob_id(ob_mi({0}))",
    ("f", "m"): "ob_fm({0})",
    ("i", "m"): "ob_im({0})",
    ("d", "m"): "ob_dm({0})",
}
_VECTOR = {"f": "vf", "d": "vd", "i": "vi", "m": "vi"}


def kind_of(dtype: DType) -> str:
    """f (f32), d (f64), i (i32) or m (mask): how values of a dtype are computed."""
    if dtype is DType.F64:
        return "d"
    if dtype is DType.BOOL:
        return "m"
    return "f" if dtype.is_float else "i"


def literal(value: float, kind: str) -> str:
    """A number in C, exactly as its type rounds it."""
    if kind in "im":
        return str(int(value))
    if isinf(value):
        return "-INFINITY" if value < 0 else "INFINITY"
    text = f"{float(np.float32(value)):.9g}" if kind == "f" else f"{value:.17g}"
    if not any(c in text for c in ".ein"):
        text += ".0"
    return text + ("f" if kind == "f" else "")


def _fits_int(value: float) -> bool:
    return not isinf(value) and value == int(value) and abs(value) < 2**31


class _Emitter:
    """Emits one chain."""

    def __init__(self, kernel: Kernel, chain: Chain, number: int, lanes: int, unroll: int) -> None:
        self.kernel, self.chain, self.lanes = kernel, chain, lanes
        self.number = number
        self.lines: list[str] = []
        self.indent = 0
        v, axis = chain.vector, chain.axis
        self.order = [d for d in range(len(chain.dims)) if d not in (v, axis)]
        if axis is not None and axis != v:
            self.order.append(axis)
        self.order.append(v)
        self.depth = self._depths()
        self.inverted = self._inverted()
        self.lane_folds = [w for w in chain.writes if w.fold is not None and axis == v]
        self.row_folds = [w for w in chain.writes if w.fold is not None and axis != v]
        long = chain.dims[v].size >= unroll * lanes
        self.unroll = unroll if self.lane_folds and long else 1

    def _depths(self) -> list[int]:
        """For each value, how many loops must be open before it can be computed."""
        level = {d: i + 1 for i, d in enumerate(self.order)}
        out: list[int] = []
        for s in self.chain.code:
            if s.op is Op.ELEM:
                strides = self.chain.reads[s.place].strides
                out.append(max((level[d] for d, t in enumerate(strides) if t), default=0))
            elif s.op is Op.IOTA:
                out.append(level[s.place])
            elif s.op is Op.CONST:
                out.append(0)
            else:
                out.append(max((out[a] for a in s.args), default=0))
        return out

    def _inverted(self) -> set[int]:
        """Divisors in f32 that an outer loop knows: their reciprocal is taken there, once, and the
        innermost loop multiplies (at most half a unit in the last place further off).
        """
        code, inner = self.chain.code, len(self.order)
        return {
            s.args[1]
            for n, s in enumerate(code)
            if s.op is Op.DIV
            and self.depth[n] == inner > self.depth[s.args[1]]
            and self.operand_kind(s) == "f"
        }

    # ---- text

    def line(self, text: str) -> None:
        self.lines.append("  " * self.indent + text)

    def open(self, text: str) -> None:
        self.line(f"{text} {{" if text else "{")
        self.indent += 1

    def close(self) -> None:
        self.indent -= 1
        self.line("}")

    def extent(self, d: int) -> str:
        return extent(self.chain.dims[d])

    def buffer(self, number: int) -> Buffer:
        return self.kernel.buffers[number]

    def index(self, strides: tuple[int, ...], vector: str) -> str:
        """The element index of an access; `vector` is the index along the vector dim ("" leaves it
        out).
        """
        parts = []
        for d in self.order:
            if strides[d] and (d != self.chain.vector or vector):
                name = vector if d == self.chain.vector else f"i{d}"
                parts.append(name if strides[d] == 1 else f"{name} * {strides[d]}")
        return " + ".join(parts) or "0"

    # ---- values

    def as_kind(self, v: int, kind: str) -> str:
        """Value `v` as an expression of a kind."""
        s = self.chain.code[v]
        if s.op is Op.CONST:
            if kind == "m":
                return f"ob_splat_i({-1 if s.value else 0})"
            return f"ob_splat_{kind}({literal(s.value, kind)})"
        have = kind_of(s.dtype)
        return f"v{v}" if have == kind else _CONVERT[have, kind].format(f"v{v}")

    def operand_kind(self, s: Scalar) -> str:
        """The kind in which an elementwise operator's operands meet."""
        code = self.chain.code
        args = s.args[1:] if s.op is Op.WHERE else s.args
        kinds = {kind_of(code[a].dtype) for a in args if code[a].op is not Op.CONST}
        consts = [code[a].value for a in args if code[a].op is Op.CONST]
        for k in "dfim":
            if k in kinds:
                if k == "i" and not all(_fits_int(c) for c in consts):
                    return "d"
                return k
        return kind_of(s.dtype) if s.op is not Op.LESS else "f"

    def expression(self, n: int) -> str:
        """The C expression of value `n`, an elementwise operator, in the kind of its dtype."""
        s = self.chain.code[n]
        want = kind_of(s.dtype)
        if s.op is Op.CAST:
            text = self.as_kind(s.args[0], want)
        elif s.op is Op.WHERE:
            k = self.operand_kind(s)
            cond, a, b = self.as_kind(s.args[0], "m"), *(self.as_kind(v, k) for v in s.args[1:])
            text = f"ob_sel_{'i' if k == 'm' else k}({cond}, {a}, {b})"
            text = text if k == want else _CONVERT[k, want].format(text)
        elif s.op is Op.LESS:
            k = self.operand_kind(s)
            a, b = (self.as_kind(v, k) for v in s.args)
            text = f"ob_less_{'i' if k == 'm' else k}({a}, {b})"
        else:
            k = self.operand_kind(s)
            args = [self.as_kind(v, k) for v in s.args]
            if s.op is Op.DIV and s.args[1] in self.inverted and self.depth[n] == len(self.order):
                return f"{args[0]} * q{s.args[1]}"
            match s.op:
                case Op.ADD | Op.SUB | Op.MUL | Op.DIV:
                    text = f"{args[0]} {_ARITH[s.op]} {args[1]}"
                case Op.NEG:
                    text = f"-{args[0]}"
                case Op.SQUARE:
                    text = f"{args[0]} * {args[0]}"
                case _:
                    text = f"ob_{s.op.value}_{k}({', '.join(args)})"
            text = text if k == want else _CONVERT[k, want].format(text)
        return f"ob_wrap8({text})" if s.dtype is DType.I8 else text

    def value(self, v: int, vector: str, count: str) -> None:
        """Declare value `v`; `count`: the valid lanes of a tail ("" for whole vectors)."""
        s = self.chain.code[v]
        if s.op is not Op.CONST:
            self.define(v, vector, count)
        if v in self.inverted:
            self.line(f"const vf q{v} = ob_recip_f({self.as_kind(v, 'f')});")

    def define(self, v: int, vector: str, count: str) -> None:
        """Declare value `v`, which is no constant."""
        s = self.chain.code[v]
        if s.op is Op.IOTA:
            if s.place == self.chain.vector:
                text = f"ob_iota((int32_t)({vector}))"
            else:
                text = f"ob_splat_i((int32_t)i{s.place})"
        elif s.op is Op.ELEM:
            access = self.chain.reads[s.place]
            dtype = self.buffer(access.buffer).dtype
            stride = access.strides[self.chain.vector]
            at = f"x{s.place} + {self.index(access.strides, vector)}"
            if stride == 0:
                text = f"ob_sp_{dtype}({at})"
            elif stride == 1:
                text = f"ob_ldt_{dtype}({at}, {count})" if count else f"ob_ld_{dtype}({at})"
            elif count:
                text = f"ob_ldgt_{dtype}({at}, {stride}, {count})"
            else:
                text = f"ob_ldg_{dtype}({at}, {stride})"
            if s.dtype is DType.I8 and dtype is DType.I32:
                text = f"ob_wrap8({text})"
            have = kind_of(dtype)
            want = kind_of(s.dtype)
            text = text if have == want else _CONVERT[have, want].format(text)
        else:
            text = self.expression(v)
        self.line(f"const {_VECTOR[kind_of(s.dtype)]} v{v} = {text};")

    def values(self, depth: int, vector: str = "", count: str = "") -> None:
        for v in range(len(self.chain.code)):
            if self.depth[v] == depth:
                self.value(v, vector, count)

    # ---- writes

    def neutral(self, w: Write, kind: str) -> str:
        """The neutral element of a fold."""
        if w.fold is Op.SUM:
            return f"ob_splat_{kind}(0)"
        return f"ob_splat_{kind}({'INT32_MIN' if kind == 'i' else '-INFINITY'})"

    def combine(self, w: Write, kind: str, a: str, b: str) -> str:
        add = w.fold is Op.SUM if w.fold is not None else w.mode is not Mode.MAX
        return f"{a} + {b}" if add else f"ob_max_{kind}({a}, {b})"

    def buffer_kind(self, w: Write) -> str:
        return kind_of(self.buffer(w.access.buffer).dtype)

    def write(self, n: int, w: Write, vector: str, count: str, copy: int) -> None:
        """One write of a point of the innermost loop."""
        kind = self.buffer_kind(w)
        value = self.as_kind(w.value, kind)
        if w in self.lane_folds:
            acc = f"a{n}_{copy}"
            if count:
                select = f"ob_sel_{'i' if kind == 'm' else kind}"
                value = f"{select}(ob_first({count}), {value}, {self.neutral(w, kind)})"
            self.line(f"{acc} = {self.combine(w, kind, acc, value)};")
            return
        dtype = self.buffer(w.access.buffer).dtype
        stride = w.access.strides[self.chain.vector]
        at = f"y{n} + {self.index(w.access.strides, vector)}"
        if w.fold is not None or w.mode is not Mode.SET:
            old = self.load(dtype, at, stride, count)
            value = self.combine(w, kind, old, value)
        if stride in (0, 1) and (stride == 1 or self.chain.dims[self.chain.vector].size == 1):
            self.line(
                f"ob_stt_{dtype}({at}, {value}, {count});"
                if count
                else f"ob_st_{dtype}({at}, {value});"
            )
        else:
            self.line(
                f"ob_stst_{dtype}({at}, {stride}, {value}, {count});"
                if count
                else f"ob_sts_{dtype}({at}, {stride}, {value});"
            )

    def load(self, dtype: DType, at: str, stride: int, count: str) -> str:
        if stride in (0, 1):
            return f"ob_ldt_{dtype}({at}, {count})" if count else f"ob_ld_{dtype}({at})"
        return (
            f"ob_ldgt_{dtype}({at}, {stride}, {count})"
            if count
            else f"ob_ldg_{dtype}({at}, {stride})"
        )

    # ---- loops

    def point(self, vector: str, count: str, copy: int) -> None:
        """The innermost body for one vector."""
        self.values(len(self.order), vector, count)
        for n, w in enumerate(self.chain.writes):
            self.write(n, w, vector, count, copy)

    def innermost(self) -> None:
        """The loop over vectors, its tail, and folds along lanes."""
        v, lanes, unroll = self.chain.vector, self.lanes, self.unroll
        n, static = self.extent(v), self.chain.dims[v].split is None
        size = self.chain.dims[v].size
        for k, w in enumerate(self.chain.writes):
            if w in self.lane_folds:
                kind = self.buffer_kind(w)
                for c in range(unroll):
                    self.line(f"{_VECTOR[kind]} a{k}_{c} = {self.neutral(w, kind)};")
        self.line("long iv = 0;")
        if unroll > 1:
            self.open(f"for (; iv + {unroll * lanes} <= {n}; iv += {unroll * lanes})")
            for c in range(unroll):
                self.line("{")
                self.indent += 1
                self.point(f"(iv + {c * lanes})" if c else "iv", "", c)
                self.close()
            self.close()
        left = size % (unroll * lanes) if unroll > 1 else size
        if not static or left >= lanes:
            self.open(f"for (; iv + {lanes} <= {n}; iv += {lanes})")
            self.point("iv", "", 0)
            self.close()
        if not static or size % lanes:
            self.open(f"if (iv < {n})")
            self.line(f"const long left = {n} - iv;")
            self.point("iv", "left", 0)
            self.close()
        for k, w in enumerate(self.chain.writes):
            if w in self.lane_folds:
                self.settle(k, w)

    def settle(self, k: int, w: Write) -> None:
        """Fold the lanes of an accumulator and write the result."""
        kind = self.buffer_kind(w)
        copies = [f"a{k}_{c}" for c in range(self.unroll)]
        while len(copies) > 1:
            half = len(copies) // 2
            for a, b in zip(copies[:half], copies[half:], strict=False):
                self.line(f"{a} = {self.combine(w, kind, a, b)};")
            copies = copies[:half] + copies[2 * half :]
        fold = f"ob_hsum_{kind}" if w.fold is Op.SUM else f"ob_hmax_{kind}"
        at = f"y{k}[{self.index(w.access.strides, '')}]"
        match w.mode:
            case Mode.SET:
                self.line(f"{at} = {fold}(a{k}_0);")
            case Mode.MAX:
                lanes = f"ob_max_{kind}(ob_splat_{kind}({at}), a{k}_0)"
                self.line(f"{at} = {fold}({lanes});")
            case _:
                self.line(f"{at} += {fold}(a{k}_0);")

    def start_rows(self) -> None:
        """Neutral elements under a fold along a dim that is not the vector's."""
        chain = self.chain
        for n, w in enumerate(chain.writes):
            if w not in self.row_folds or w.mode is not Mode.SET:
                continue
            kind, dtype = self.buffer_kind(w), self.buffer(w.access.buffer).dtype
            stride = w.access.strides[chain.vector]
            at = self.index(w.access.strides, "j")
            scalar = self.neutral(w, kind).split("(", 1)[1][:-1]
            one = chain.dims[chain.vector].size == 1 or stride
            assert one, "a fold writes one element per point of the other dims"
            self.line(
                f"for (long j = 0; j < {self.extent(chain.vector)}; j++) "
                f"y{n}[{at}] = ({CTYPE[dtype]}){scalar};"
            )

    def run(self) -> list[str]:
        chain, kernel = self.chain, self.kernel
        guards = [
            f"{self.extent(d)} > 0"
            for d in range(len(chain.dims))
            if chain.dims[d].split is not None and d != chain.axis
        ]
        if chain.skip_first:
            guards.insert(0, "it > 0")
        self.open(f"if ({' && '.join(guards)})" if guards else "")
        for n, r in enumerate(chain.reads):
            buffer = self.buffer(r.buffer)
            text = pointer(kernel, r.buffer, r.offset, r.moves)
            self.line(f"const {CTYPE[buffer.dtype]} *const x{n} = {text};")
        for n, w in enumerate(chain.writes):
            buffer = self.buffer(w.access.buffer)
            text = pointer(kernel, w.access.buffer, w.access.offset, w.access.moves)
            self.line(f"{CTYPE[buffer.dtype]} *const y{n} = {text};")
        self.values(0)
        opened = 0
        for level, d in enumerate(self.order[:-1]):
            if d == chain.axis:
                self.start_rows()
            self.open(f"for (long i{d} = 0; i{d} < {self.extent(d)}; i{d}++)")
            self.values(level + 1)
            opened += 1
        self.innermost()
        for _ in range(opened):
            self.close()
        self.close()
        return self.lines


@dataclass(frozen=True, slots=True)
class ChainStyle:
    """Lanes of an f32 vector, and the options."""

    lanes: int
    options: CpuOptions


def emit_chain(kernel: Kernel, chain: Chain, number: int, style: ChainStyle) -> list[str]:
    """The C lines of a chain, as a block of their own."""
    return _Emitter(kernel, chain, number, style.lanes, style.options.unroll).run()
