"""The named programs: what Obelisk is measured on, with the shapes of the published benchmarks.

Gives kernel graphs of plain operators, as a user would write them, and for each the same
mathematics in the idiom of numpy and of torch, which is what results are compared with. `gqa`,
`mha`, `mqa` and `qknorm` follow the published scripts: exp, sum and divide with neither the row
maximum nor a scale; `attention` and `qknorm_k` are the safe, scaled forms that models use.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from obelisk.base.errors import DTypeError, ShapeError, UnknownName
from obelisk.ir import DType, Graph, KernelGraph, Node, parse_dtype

Tensors = (
    Any  # arrays of numpy or torch; both libraries are reached through the module that is passed in
)
Idiom = Callable[..., Tensors]

KEYS, HEAD, WIDTH = 4096, 64, 4096


@dataclass(frozen=True, slots=True)
class Program:
    """A named program.

    Attributes:
        name: what the command line calls it.
        summary: the formula, for people.
        shapes: input names and shapes at batch 1.
        batched: (input name, axis) pairs: the dims that the batch multiplies.
        build: adds the operators to a `KernelGraph`; takes it and the inputs, returns the result.
        numpy: the same formula as `f(np, *arrays)`.
        torch: the same formula as `f(torch, *tensors)`, in the library's own idiom.
        sdpa: the formula through torch's scaled_dot_product_attention, for attentions.
    """

    name: str
    summary: str
    shapes: Mapping[str, tuple[int, ...]]
    batched: tuple[tuple[str, int], ...]
    build: Callable[..., Node]
    numpy: Idiom
    torch: Idiom
    sdpa: Idiom | None = None

    def graph(self, batch: int = 1, dtype: str | DType = DType.F32) -> Graph:
        """The program for `batch` >= 1 (it multiplies rows or heads) in a floating dtype.

        Raises `ShapeError` for a batch below 1 and `DTypeError` for a dtype that is not floating.
        """
        if batch < 1:
            raise ShapeError(f"{self.name}: batch is {batch}, expected 1 or more")
        kind = parse_dtype(dtype)
        if not kind.is_float:
            raise DTypeError(f"{self.name}: dtype {kind} is no floating type; use f32, f16 or bf16")
        g = KernelGraph(self.name)
        grown = dict(self.batched)
        inputs = []
        for label, shape in self.shapes.items():
            dims = list(shape)
            if label in grown:
                dims[grown[label]] *= batch
            inputs.append(g.input(dims, kind, name=label))
        g.output(self.build(g, *inputs), name="out")
        return g.freeze()

    def batch_of(self, graph: Graph) -> int:
        """The batch at which this program's first batched input has the extent it has in `graph`.

        1 where there is none: shapes are compared by whoever compares the graphs.
        """
        label, axis = self.batched[0]
        position = list(self.shapes).index(label)
        if position >= len(graph.inputs) or graph.inputs[position].rank <= axis:
            return 1
        return max(1, graph.inputs[position].shape[axis] // self.shapes[label][axis])


def _scores(g: Any, q: Node, k: Node, v: Node) -> Node:
    """exp(q k) v, each row divided by its sum of exponentials."""
    e = g.exp(g.matmul(q, k))
    out: Node = g.matmul(g.div(e, g.sum(e, 2)), v)
    return out


def _rms(lib: Any, x: Tensors, axis: int = -1, eps: float = 0.0) -> Tensors:
    """x over the root of its mean square, spelled alike in numpy and torch."""
    return x / lib.sqrt((x * x).mean(axis, keepdims=True) + eps)


def _rms_torch(torch: Any, x: Tensors, eps: float = 0.0) -> Tensors:
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), eps=eps)


def _attend(lib: Any, q: Tensors, k: Tensors, v: Tensors) -> Tensors:
    e = lib.exp(q @ k)
    return (e / e.sum(-1, keepdims=True)) @ v


def _safe_numpy(np: Any, q: Tensors, k: Tensors, v: Tensors) -> Tensors:
    s = (q @ k.swapaxes(-1, -2)) * np.asarray(HEAD**-0.5, q.dtype)
    e = np.exp(s - s.max(-1, keepdims=True))
    return (e / e.sum(-1, keepdims=True)) @ v


def _safe_torch(torch: Any, q: Tensors, k: Tensors, v: Tensors) -> Tensors:
    return torch.softmax((q @ k.transpose(-1, -2)) * HEAD**-0.5, -1) @ v


def _sdpa(torch: Any, q: Tensors, k: Tensors, v: Tensors, scale: float) -> Tensors:
    """`k` is (heads, keys, dim) here. The call wants a batch axis in front."""
    fused = torch.nn.functional.scaled_dot_product_attention
    return fused(q[None], k[None], v[None], scale=scale)[0]


def _sdpa_plain(torch: Any, q: Tensors, k: Tensors, v: Tensors) -> Tensors:
    return _sdpa(torch, q, k.transpose(-1, -2), v, 1.0)


def _sdpa_norm(torch: Any, q: Tensors, k: Tensors, v: Tensors) -> Tensors:
    return _sdpa_plain(torch, _rms_torch(torch, q), k, _rms_torch(torch, v))


def _silu_numpy(np: Any, x: Tensors) -> Tensors:
    return x / (1 + np.exp(-x))


def _gated_numpy(np: Any, x: Tensors, w1: Tensors, w2: Tensors) -> Tensors:
    return _silu_numpy(np, x @ w1) * (x @ w2)


def _gated_torch(torch: Any, x: Tensors, w1: Tensors, w2: Tensors) -> Tensors:
    return torch.nn.functional.silu(x @ w1) * (x @ w2)


def _attention_shapes(heads: int, rows: int, transposed: bool) -> dict[str, tuple[int, ...]]:
    k = (heads, HEAD, KEYS) if transposed else (heads, KEYS, HEAD)
    return {"q": (heads, rows, HEAD), "k": k, "v": (heads, KEYS, HEAD)}


_QKV = (("q", 0), ("k", 0), ("v", 0))
_MLP = {"x": (8, WIDTH), "w1": (WIDTH, WIDTH), "w2": (WIDTH, WIDTH)}


def _plain_attention(name: str, heads: int, rows: int) -> Program:
    return Program(
        name, "e = exp(q k); (e / sum(e)) v", _attention_shapes(heads, rows, True), _QKV,
        _scores, _attend, _attend, _sdpa_plain,
    )  # fmt: skip


def _programs() -> tuple[Program, ...]:
    """All of them, the nine of the published benchmarks first."""
    return (
        _plain_attention("gqa", 2, 256),
        _plain_attention("mha", 32, 16),
        _plain_attention("mqa", 1, 1024),
        Program(
            "qknorm", "gqa on rms(q), k, rms(v)", _attention_shapes(2, 256, True), _QKV,
            lambda g, q, k, v: _scores(g, g.rms_norm(q), k, g.rms_norm(v)),
            lambda np, q, k, v: _attend(np, _rms(np, q), k, _rms(np, v)),
            lambda torch, q, k, v: _attend(torch, _rms_torch(torch, q), k, _rms_torch(torch, v)),
            _sdpa_norm,
        ),
        Program(
            "rmsnorm", "rms(x) w", {"x": (2, WIDTH), "w": (WIDTH, 6144)}, (("x", 0),),
            lambda g, x, w: g.matmul(g.rms_norm(x), w),
            lambda np, x, w: _rms(np, x) @ w,
            lambda torch, x, w: _rms_torch(torch, x) @ w,
        ),
        Program(
            "lora", "x w + (x a) b",
            {"x": (16, 256), "w": (256, WIDTH), "a": (256, 16), "b": (16, WIDTH)}, (("x", 0),),
            lambda g, x, w, a, b: g.add(g.matmul(x, w), g.matmul(g.matmul(x, a), b)),
            lambda np, x, w, a, b: x @ w + (x @ a) @ b,
            lambda torch, x, w, a, b: x @ w + (x @ a) @ b,
        ),
        Program(
            "gated_mlp", "silu(x w1) * (x w2)", _MLP, (("x", 0),),
            lambda g, x, w1, w2: g.mul(g.silu(g.matmul(x, w1)), g.matmul(x, w2)),
            _gated_numpy, _gated_torch,
        ),
        Program(
            "ntrans", "rms(x + alpha * (rms(h) + x))",
            {"h": (8, WIDTH), "x": (8, WIDTH), "alpha": (8, WIDTH)},
            (("h", 0), ("x", 0), ("alpha", 0)),
            lambda g, h, x, a: g.rms_norm(g.add(x, g.mul(a, g.add(g.rms_norm(h), x)))),
            lambda np, h, x, a: _rms(np, x + a * (_rms(np, h) + x)),
            lambda torch, h, x, a: _rms_torch(torch, x + a * (_rms_torch(torch, h) + x)),
        ),
        Program(
            "moe", "exp(x a) b, per expert",
            {"x": (8, 8, WIDTH), "a": (8, WIDTH, WIDTH), "b": (8, WIDTH, WIDTH)}, (("x", 1),),
            lambda g, x, a, b: g.matmul(g.exp(g.matmul(x, a)), b),
            lambda np, x, a, b: np.exp(x @ a) @ b,
            lambda torch, x, a, b: torch.exp(x @ a) @ b,
        ),
        Program(
            "attention", "softmax(q k^T / sqrt(d)) v", _attention_shapes(2, 256, False), _QKV,
            lambda g, q, k, v: g.attention(q, k, v),
            _safe_numpy, _safe_torch,
            lambda torch, q, k, v: _sdpa(torch, q, k, v, HEAD**-0.5),
        ),
        Program(
            "qknorm_k", "attention on rms(q), rms(k), v (eps 1e-6)",
            _attention_shapes(2, 256, False), _QKV,
            lambda g, q, k, v: g.attention(g.rms_norm(q, None, 1e-6), g.rms_norm(k, None, 1e-6), v),
            lambda np, q, k, v: _safe_numpy(np, _rms(np, q, -1, 1e-6), _rms(np, k, -1, 1e-6), v),
            lambda torch, q, k, v: _safe_torch(
                torch, _rms_torch(torch, q, 1e-6), _rms_torch(torch, k, 1e-6), v
            ),
            lambda torch, q, k, v: _sdpa(
                torch, _rms_torch(torch, q, 1e-6), _rms_torch(torch, k, 1e-6), v, HEAD**-0.5
            ),
        ),
        Program(
            "mlp", "(silu(x w1) * (x w2)) w3", {**_MLP, "w3": (WIDTH, WIDTH)}, (("x", 0),),
            lambda g, x, w1, w2, w3: g.matmul(
                g.mul(g.silu(g.matmul(x, w1)), g.matmul(x, w2)), w3
            ),
            lambda np, x, w1, w2, w3: _gated_numpy(np, x, w1, w2) @ w3,
            lambda torch, x, w1, w2, w3: _gated_torch(torch, x, w1, w2) @ w3,
        ),
    )  # fmt: skip


PROGRAMS: Mapping[str, Program] = MappingProxyType({p.name: p for p in _programs()})
PUBLISHED = ("gqa", "mha", "mqa", "qknorm", "rmsnorm", "lora", "gated_mlp", "ntrans", "moe")


def find_program(name: str) -> Program:
    """The named program; raises `UnknownName` with the known names and the closest ones."""
    found = PROGRAMS.get(name) or PROGRAMS.get(name.lower().replace("-", "_"))
    if found is not None:
        return found
    near = difflib.get_close_matches(name.lower(), PROGRAMS, n=2)
    hint = f" (did you mean {' or '.join(near)}?)" if near else ""
    raise UnknownName(
        f"no program is called {name!r}{hint}: known are {', '.join(PROGRAMS)}; "
        "or give a file: .py, .json or a text form"
    )


def program_of(graph: Graph) -> Program | None:
    """The named program that `graph` is an instance of (at any batch and dtype), or None.

    Its name only suggests which; the shapes of the inputs and the content digest decide.
    """
    program = PROGRAMS.get(graph.name)
    if program is None or len(graph.inputs) != len(program.shapes):
        return None
    dtype = graph.inputs[0].dtype
    if not dtype.is_float:
        return None
    batch = program.batch_of(graph)
    return program if program.graph(batch, dtype).digest == graph.digest else None
