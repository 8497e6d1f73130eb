"""C for a whole tile program: fixed runtime in front, one function per kernel, one for the graph.

Takes a `TileProgram`, gives a self-contained translation unit. Blocks of a kernel are handed out
to threads as they come. Threads wait only between calls that depend on each other, and then for a
call's blocks, not for its threads: one that comes late, or not at all, holds nobody up.
"""

from __future__ import annotations

from importlib.resources import files
from math import prod

from obelisk.lower.chains import COSTLY
from obelisk.lower.cpu.chain import ChainStyle, emit_chain
from obelisk.lower.cpu.names import CTYPE, extent, pointer, split_line, splits_of
from obelisk.lower.cpu.options import CpuOptions
from obelisk.lower.tile import (
    Call,
    Chain,
    Kernel,
    Mode,
    Product,
    Statement,
    Tensor,
    TensorKind,
    TileProgram,
    View,
)

STREAM_COLUMNS = 192  # OB_STREAM_COLUMNS of runtime/blocking.h
SMALL_WORK = 100_000  # scalar operations, some microseconds: waking a worker costs as much

_PART = """
/* How much of a tile is there: the part of [at, at + chunk) that starts at `from` and is `tile`
long, within `full`. */ OB_INLINE long ob_part(long full, long at, long chunk, long from, long tile)
{ long stop = from + tile < chunk ? from + tile : chunk; stop = at + stop < full ? at + stop : full;
const long n = stop - (at + from); return n > 0 ? n : 0; }
        """


def runtime(name: str) -> str:
    """The text of one of the fixed runtime's files."""
    return files("obelisk.lower.cpu").joinpath("runtime", name).read_text(encoding="utf-8")


def prelude(program: TileProgram, options: CpuOptions, lanes: int) -> str:
    """Sizes, then the runtime's files; product code only for the types in use."""
    kinds = sorted(
        {s.dtype.value for k in program.kernels for s in statements(k) if isinstance(s, Product)}
    )
    sizes = {
        "OB_LANES": lanes,
        "OB_MAX_THREADS": options.max_threads,
        "OB_SPIN_MICROSECONDS": options.spin_microseconds,
        "OB_MR": options.rows,
        "OB_NV": options.vectors,
        "OB_KC": options.depth,
        "OB_MC": options.block_rows // options.rows * options.rows,
        "OB_NC": options.block_columns,
        "OB_PACK_COLUMNS": options.pack_columns,
        "OB_STREAM_ROWS": options.stream_rows,
    }
    types = {"f32": ("float", "vf"), "f64": ("double", "vd"), "i32": ("int32_t", "vi")}
    parts = [
        "#define _GNU_SOURCE 1",
        *(f"#define {k} {v}" for k, v in sizes.items()),
        runtime("vector.h"),
        _PART.strip(),
        "",
        runtime("pool.h"),
    ]
    if kinds:
        parts += [runtime("blocking.h"), _cases(options)]
    for k in kinds:
        ctype, vector = types[k]
        parts += [
            f"#define OB_T {ctype}",
            f"#define OB_V {vector}",
            f"#define OB_(name) ob_##name##_{k}",
            runtime("product.h"),
            "#undef OB_T",
            "#undef OB_V",
            "#undef OB_",
        ]
    return "\n".join(parts)


def _cases(options: CpuOptions) -> str:
    """The row counts that a product's inner loops are compiled for."""
    rest = " ".join(
        f"case {r}: OB_(micro)({r}, 0, k, a, ars, acs, b, bs, c, crs, n, add); break;"
        for r in range(1, options.rows)
    )
    return f"#define OB_ROWS_REST {rest}"


def statements(kernel: Kernel) -> tuple[Statement, ...]:
    """All statements of a kernel."""
    return (*kernel.before, *kernel.body, *kernel.after)


def streams(s: Product, options: CpuOptions) -> bool | None:
    """Whether the product routine streams its right operand; None where run-time extents decide.

    Mirrors `ob_product` of runtime/product.h. A way that no product takes is not compiled.
    """
    m, n, k = s.c.shape[-2], s.c.shape[-1], s.a.shape[-1]
    if any(e.split is not None for e in (m, n, k)):
        return None
    few = m.size <= options.stream_rows and n.size >= STREAM_COLUMNS
    return few and s.b.strides[-1] == 1


def _product(kernel: Kernel, s: Product, options: CpuOptions) -> list[str]:
    """Calls of the product routine, in loops over the batch dims."""
    rank = len(s.c.shape)
    ctype = CTYPE[s.dtype]
    lines = ["{"]
    indent = "  "

    def base(v: View, name: str, const: str) -> str:
        text = pointer(kernel, v.buffer, v.offset, v.moves)
        return f"{const}{ctype} *const {name} = {text};"

    lines.append(indent + base(s.a, "a", "const "))
    lines.append(indent + base(s.b, "b", "const "))
    lines.append(indent + base(s.c, "c", ""))
    batch = [d for d in range(rank - 2) if s.c.shape[d].size > 1 or s.c.shape[d].split]
    for d in batch:
        lines.append(f"{indent}for (long i{d} = 0; i{d} < {extent(s.c.shape[d])}; i{d}++) {{")
        indent += "  "

    def at(v: View, name: str) -> str:
        return " + ".join([name, *(f"i{d} * {v.strides[d]}L" for d in batch if v.strides[d])])

    add = "it > 0" if s.mode is Mode.ADD_AFTER_FIRST and kernel.loop > 1 else "0"
    m, n, k = extent(s.c.shape[-2]), extent(s.c.shape[-1]), extent(s.a.shape[-1])
    assert s.work is not None
    work = pointer(kernel, s.work, 0, ())
    way = {None: "product", True: "streamed", False: "packed"}[streams(s, options)]
    columns = "" if way == "streamed" else f"{s.b.strides[-1]}, "
    lines.append(
        f"{indent}ob_{way}_{s.dtype}({m}, {n}, {k}, "
        f"{at(s.a, 'a')}, {s.a.strides[-2]}, {s.a.strides[-1]}, "
        f"{at(s.b, 'b')}, {s.b.strides[-2]}, {columns}{at(s.c, 'c')}, {s.c.strides[-2]}, "
        f"{add}, {work});"
    )
    for _ in batch:
        indent = indent[:-2]
        lines.append(indent + "}")
    lines.append("}")
    return lines


def _statement(kernel: Kernel, s: Statement, number: int, style: ChainStyle) -> list[str]:
    if isinstance(s, Chain):
        return emit_chain(kernel, s, number, style)
    return _product(kernel, s, style.options)


def emit_kernel(kernel: Kernel, number: int, style: ChainStyle) -> str:
    """One kernel as a C function of the block's number, the tensors' addresses and the block's fast
    memory.
    """
    head = (
        f"static void ob_kernel_{number}(const long block, void *const *const t, char *const arena)"
    )
    lines = [
        f"/* kernel {number}: grid {kernel.grid}, loop {kernel.loop}, "
        f"{kernel.arena} bytes of tiles */",
        head + " {",
    ]
    lines.append("  (void)block; (void)arena; (void)t;")
    step = 1
    for a in reversed(range(len(kernel.grid))):
        if kernel.grid[a] > 1:
            lines.append(f"  const long g{a} = block / {step} % {kernel.grid[a]};")
        else:
            lines.append(f"  const long g{a} = 0;")
        lines.append(f"  (void)g{a};")
        step *= kernel.grid[a]
    splits = splits_of(kernel)
    for s in splits:
        if not s.loop:
            lines.append("  " + split_line(kernel, s))
    count = 0
    for part, name in ((kernel.before, "before"), (kernel.body, "body"), (kernel.after, "after")):
        if not part:
            continue
        inside = name == "body"
        pad = "    " if inside else "  "
        if inside:
            lines.append(
                f"  for (long it = 0; it < {kernel.loop}; it++) {{"
                if kernel.loop > 1
                else "  { const long it = 0; (void)it;"
            )
            for s in splits:
                if s.loop:
                    lines.append(pad + split_line(kernel, s))
        for statement in part:
            lines += [pad + x for x in _statement(kernel, statement, count, style)]
            count += 1
        if inside:
            lines.append("  }")
    lines.append("}")
    return "\n".join(lines)


def barriers(program: TileProgram) -> list[bool]:
    """For each call, whether a barrier must stand before it: it depends on a call since the last
    barrier.
    """
    out: list[bool] = []
    read: set[int] = set()
    written: set[int] = set()
    # Scratch tensors may share bytes: reusing memory that is still read is a dependence too.
    overlaps = _overlaps(program)
    for call in program.calls:
        reads = {b.tensor for b in call.params}
        writes = {b.tensor for b in call.results}
        touched = {o for w in writes for o in (w, *overlaps.get(w, ()))}
        seen = {o for r in reads for o in (r, *overlaps.get(r, ()))}
        need = bool(seen & written or touched & (read | written))
        if need:
            read, written = set(), set()
        read |= reads
        written |= writes
        out.append(need)
    return out


def _overlaps(program: TileProgram) -> dict[int, list[int]]:
    places = [
        (i, t.offset, t.offset + max(1, t.nbytes))
        for i, t in enumerate(program.tensors)
        if t.kind is TensorKind.SCRATCH
    ]
    out: dict[int, list[int]] = {}
    for i, a, b in places:
        out[i] = [j for j, c, d in places if j != i and a < d and c < b]
    return out


def _address(tensor: Tensor, offset: int) -> str:
    match tensor.kind:
        case TensorKind.INPUT:
            base = f"(char *)f->inputs[{tensor.index}]"
        case TensorKind.OUTPUT:
            base = f"(char *)f->outputs[{tensor.index}]"
        case TensorKind.SCRATCH:
            base = f"f->scratch + {tensor.offset}L"
    step = int(offset * tensor.dtype.nbytes)
    return base + (f" + {step}L" if step else "")


def _call(program: TileProgram, call: Call, number: int, threads: int) -> list[str]:
    kernel = program.kernels[call.kernel]
    addresses = [
        _address(program.tensors[b.tensor], b.offset) for b in (*call.params, *call.results)
    ]
    # Enough pieces for balance, few enough that handing them out costs nothing.
    chunk, blocks = max(1, kernel.blocks // (threads * 16)), kernel.blocks
    return [
        f"  {{ /* {call.origin} */",
        f"    void *const t[] = {{{', '.join(addresses)}}};",
        f"    for (long b; (b = ob_take(&f->calls[{number}], {chunk})) < {blocks};) {{",
        f"      const long end = b + {chunk} < {blocks} ? b + {chunk} : {blocks};",
        f"      for (long i = b; i < end; i++) ob_kernel_{call.kernel}(i, t, arena);",
        f"      ob_finish(&f->calls[{number}], end - b);",
        "    }",
        "  }",
    ]


def _graph(program: TileProgram, threads: int) -> list[str]:
    """The function that every thread runs: all calls in order, waiting where one needs another."""
    lines = [
        "static void ob_graph(int thread, void *arg) {",
        "  ob_frame *const f = arg;",
        f"  char *const arena = f->scratch + {program.scratch}L",
        f"                      + thread * {arena_stride(program)}L;",
        "  (void)arena;",
    ]
    pending: list[int] = []
    for i, (call, wait) in enumerate(zip(program.calls, barriers(program), strict=True)):
        if wait:
            for j in pending:
                blocks = program.kernels[program.calls[j].kernel].blocks
                lines.append(f"  ob_await(&f->calls[{j}], {blocks});")
            pending = []
        lines += _call(program, call, i, threads)
        pending.append(i)
    for j in pending:
        blocks = program.kernels[program.calls[j].kernel].blocks
        lines.append(f"  ob_await(&f->calls[{j}], {blocks});")
    return [*lines, "}", ""]


def useful_threads(program: TileProgram, threads: int) -> int:
    """How many threads can have work: no more than the most blocks of a call, and one where all
    work together takes less than it costs to hand it over.
    """
    work = sum(
        program.kernels[c.kernel].blocks * block_work(program.kernels[c.kernel])
        for c in program.calls
    )
    if work < SMALL_WORK:
        return 1
    return max(1, min(threads, max(program.kernels[c.kernel].blocks for c in program.calls)))


def block_work(kernel: Kernel) -> int:
    """Scalar operations of a block, roughly: a transcendental function counts as eight."""
    total = 0
    for s in statements(kernel):
        times = kernel.loop if s in kernel.body else 1
        if isinstance(s, Chain):
            each = sum(8 if c.op in COSTLY else 1 for c in s.code) + len(s.writes)
            total += times * each * prod(e.size for e in s.dims)
        else:
            total += times * prod(s.c.sizes) * s.a.sizes[-1]
    return total


def emit_program(program: TileProgram, options: CpuOptions, lanes: int) -> str:
    """The translation unit."""
    style = ChainStyle(lanes, options)
    parts = [
        f"/* Obelisk: tile program {program.digest}; "
        f"{len(program.calls)} calls of {len(program.kernels)} kernels. */",
        prelude(program, options, lanes),
        "",
        *(emit_kernel(k, i, style) + "\n" for i, k in enumerate(program.kernels)),
    ]
    lines = [
        "typedef struct {",
        "  void *const *inputs;",
        "  void *const *outputs;",
        "  char *scratch;",
        f"  ob_blocks calls[{max(1, len(program.calls))}];",
        "} ob_frame;",
        "",
        *_graph(program, options.max_threads),
        '__attribute__((visibility("default")))',
        "int obelisk_run(void *const *inputs, void *const *outputs, void *scratch, int threads) {",
        "  ob_frame frame = {.inputs = inputs, .outputs = outputs, .scratch = scratch};",
        f"  const int useful = {useful_threads(program, options.max_threads)};",
        "  ob_pool_run(threads < useful ? threads : useful, ob_graph, &frame);",
        "  return 0;",
        "}",
        "",
    ]
    return "\n".join([*parts, *lines])


def arena_stride(program: TileProgram) -> int:
    """Bytes from one thread's fast memory to the next: whole pages, so that threads share no line,
    plus one line.
    """
    return -(-program.arena // 4096) * 4096 + 64
