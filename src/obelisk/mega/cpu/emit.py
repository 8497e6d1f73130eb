"""C for one schedule: sizes, the fixed runtime, and one straight program for each core.

Takes a checked `Schedule` and a `WeightLayout`; gives an `Emitted` text and the names of its edges.
Layers are alike, so each program is a prologue, one loop over layers, and an epilogue; there is no
dispatch and no branch on what a step holds, only loop counts. Equal arguments give equal text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from obelisk.base.digest import digest
from obelisk.base.errors import InternalError
from obelisk.lower.cpu.emit import runtime as lower_runtime
from obelisk.plan.layout import WORD, WeightLayout
from obelisk.schedule.types import Await, Barrier, Item, Run, Schedule, Signal
from obelisk.tasks.dag import task_reads
from obelisk.tasks.kinds import TABLE, Region, Task, TaskKind, value_width
from obelisk.tasks.workload import WeightFormat, Workload


@dataclass(frozen=True, slots=True)
class Edge:
    """A counter family: index of its first counter, counters for each layer, and whether it has
    one for every layer.
    """

    name: str
    base: int
    groups: int
    layered: bool


@dataclass(frozen=True, slots=True)
class Probes:
    """Where a recording launch leaves operators' results: (batch, width) fp32 rows each.

    Attributes:
        places: "kind:value" to (offset of layer 0, width), in fp32 elements.
        layer: elements from one layer to the next (results outside the layers have one place).
        size: elements in all.
    """

    places: Mapping[str, tuple[int, int]]
    layer: int
    size: int

    def to_json(self) -> dict[str, Any]:
        """A JSON object of the fields."""
        return {"layer": self.layer, "size": self.size,
                "places": {k: list(v) for k, v in self.places.items()}}  # fmt: skip


_NO_PROBE = ("keys", "values", "token")  # the cache holds the first two; the last is no number


def _probes(schedule: Schedule) -> Probes:
    s = schedule.shape
    widths = value_width(s)
    inner: dict[str, int] = {}
    outer: dict[str, int] = {}
    for program in schedule.programs:
        for item in program:
            if isinstance(item, Run) and item.task.layer <= 0 and item.task.core <= 0:
                to = outer if item.task.layer < 0 else inner
                for r in TABLE[item.task.kind].writes(s, item.task):
                    if r.value not in _NO_PROBE:
                        to[f"{item.task.kind}:{r.value}"] = widths[r.value]
    places, at = {}, 0
    for name in sorted(inner):
        places[name] = (at, inner[name])
        at += s.batch * inner[name]
    layer, at = at, at * s.model.layers
    for name in sorted(outer):
        places[name] = (at, outer[name])
        at += s.batch * outer[name]
    return Probes(places, layer, at)


@dataclass(frozen=True, slots=True)
class Emitted:
    """The program.

    Attributes:
        source: C, one translation unit with the entry `obelisk_mega`.
        edges: what the numbers in a fault report mean; the barrier is edge -1 - position of
            `barriers`.
        barriers: names of barriers, in order.
        digest: of the source.
        probes: where a recording launch leaves what each operator wrote.
    """

    source: str
    edges: tuple[Edge, ...]
    barriers: tuple[str, ...]
    digest: str
    probes: Probes


def _text(name: str) -> str:
    return files("obelisk.mega.cpu").joinpath("runtime", name).read_text(encoding="utf-8")


def _split(name: str) -> tuple[str, int, int]:
    """`qkv@3.1` as (qkv, 3, 1); no group is 0."""
    base, _, rest = name.partition("@")
    layer, _, group = rest.partition(".")
    return base, int(layer), int(group or 0)


def _item_layer(item: Item) -> int:
    match item:
        case Run(task):
            return task.layer
        case Signal(name) | Barrier(name) | Await(name, _):
            return _split(name)[1]


def _edges(schedule: Schedule) -> tuple[tuple[Edge, ...], int]:
    """Counter families of a schedule, and the number of counters."""
    groups: dict[str, int] = {}
    layered: dict[str, bool] = {}
    for program in schedule.programs:
        for item in program:
            if isinstance(item, Signal | Await):
                base, layer, group = _split(item.counter)
                groups[base] = max(groups.get(base, 0), group + 1)
                layered[base] = layer >= 0
    out, at = [], 0
    for base in sorted(groups):
        out.append(Edge(base, at, groups[base], layered[base]))
        at += groups[base] * (schedule.shape.model.layers if layered[base] else 1)
    return tuple(out), at


def _defines(schedule: Schedule, weights: WeightLayout, counters: int) -> list[str]:
    s, m, t = schedule.shape, schedule.shape.model, schedule.shape.tiling
    pages = dict(schedule.pages.pages)
    tiles = len(s.cuts(s.vocab_rows, t.head))
    chunk = s.lanes * WORD if s.work.weights is WeightFormat.W4A16 else s.lanes
    values: dict[str, int | str] = {
        "BATCH": s.batch, "CORES": schedule.cores, "LAYERS": m.layers, "HIDDEN": m.hidden,
        "HIDDEN_CHUNKS": -(-m.hidden // chunk), "O_CHUNKS": -(-m.q_width // chunk),
        "DOWN_CHUNKS": -(-m.ffn // chunk), "OUTER_CHUNKS": -(-m.hidden // s.lanes),
        "GROUP": m.group, "KV_HEADS": m.kv_heads, "HEAD_DIM": m.head_dim,
        "GROUP_ROWS": s.group_rows, "FFN": m.ffn, "VOCAB": m.vocab, "CONTEXT": s.work.context,
        "EPS": f"{m.eps!r}f", "SCALE": f"{m.head_dim ** -0.5!r}f", "PANEL": t.panel,
        "SPLITS": t.kv_splits, "GROUP_COLS": s.work.group, "ZEROS": int(s.work.zeros),
        "COUNTERS": max(1, counters), "HEAD_TILES": tiles,
        "TOKEN_STRIDE": pages["token"].stride, "AT_TOKEN": pages["token"].offset,
        "X_STRIDE": pages["x"].stride, "Q_STRIDE": pages["q"].stride,
        "ACT_STRIDE": pages["act"].stride, "LOGITS_STRIDE": pages["logits"].stride,
        "BEST_STRIDE": pages["best"].stride, "PART_WIDTH": s.part_width,
        "PART_STRIDE": pages["part"].stride if "part" in pages else 0,
        "LAYER_OFFSET": weights.layer_offset, "LAYER_BYTES": weights.layer_bytes,
    }  # fmt: skip
    if any(pages[h].stride != pages["x"].stride for h in pages if h.startswith("h")):
        raise InternalError("norms and the residual stream must share one stride")
    if pages["attn"].stride != pages["q"].stride:
        raise InternalError("queries and attention must share one stride")
    return [f"#define OM_{name} {value}" for name, value in values.items()]


class _Printer:
    """Prints items of one core's program."""

    def __init__(
        self, schedule: Schedule, weights: WeightLayout, edges: Sequence[Edge],
        barriers: Sequence[str], probes: Probes,
    ) -> None:  # fmt: skip
        self.probes = probes
        self.schedule, self.s = schedule, schedule.shape
        self.pages = dict(schedule.pages.pages)
        self.edges = {e.name: e for e in edges}
        self.barriers = list(barriers)
        self.totals: dict[str, int] = {}
        for program in schedule.programs:
            for item in program:
                if isinstance(item, Signal):
                    self.totals[item.counter] = self.totals.get(item.counter, 0) + 1
        self.offsets: dict[str, str] = {}
        parts = (("s->l->weights", weights.matrices, weights.vectors),
                 ("w", weights.layer_matrices, weights.layer_vectors))  # fmt: skip
        for base, matrices, vectors in parts:
            for m in matrices:
                scale, zero = (
                    f"(const void *)({base} + {at})" if at >= 0 else "NULL"
                    for at in (m.scale_offset, m.zero_offset)
                )
                self.offsets[m.name] = f"(om_matrix){{{base} + {m.offset}, {scale}, {zero}}}"
            for v in vectors:
                self.offsets[v.name] = f"(const float *)({base} + {v.offset})"
        if "head" not in self.offsets:  # tied
            self.offsets["head"] = self.offsets["embed"]

    def page(self, value: str) -> str:
        """Address of a value's page."""
        return f"m + {self.pages[value].offset}"

    def matrix(self, name: str) -> str:
        """A matrix, its scales and its zeros."""
        return self.offsets[name]

    def vector(self, name: str) -> str:
        """A vector, or NULL where the model has none."""
        return self.offsets.get(name, "NULL")

    def counter(self, name: str) -> str:
        """A counter's index."""
        base, layer, group = _split(name)
        edge = self.edges[base]
        at = edge.base + group
        return f"{at} + l * {edge.groups}" if layer >= 0 else str(at)

    def item(self, item: Item, core: int) -> list[str]:
        """Lines of C."""
        match item:
            case Signal(name):
                return [f"om_signal(&s->counters[{self.counter(name)}]);  /* {_label(name)} */"]
            case Await(name, count):
                at, total = self.counter(name), self.totals.get(name, count)
                return [
                    f"if (om_wait(s, &s->counters[{at}], e * {total}u + {count}u, {core}, e, {at}, "
                    f"{count}u)) return;  /* {_label(name)} */"
                ]
            case Barrier(name):
                edge = -1 - self.barriers.index(_label(name))
                return [f"if (om_meet(s, &met, {core}, e, {edge})) return;  /* {_label(name)} */"]
            case Run(task):
                return self.run(task, core)

    def run(self, task: Task, core: int) -> list[str]:
        """A task's call, and its check when debugging."""
        reads = task_reads(self.s, task, core)
        h = next((r.value for r in reads if r.value[0] == "h"), "h")
        lo, hi, k = task.lo, task.hi, TaskKind
        p, mat, vec = self.page, self.matrix, self.vector
        turn = f"{vec('q_gain')}, {vec('k_gain')}, {p('q')}"
        match task.kind:
            case k.EMBED:
                call = f"om_embed({mat('embed')}, {p('token')}, {p('x')})"
            case k.NORM_IN | k.NORM_MID | k.NORM_FINAL:
                made = TABLE[task.kind].writes(self.s, task)[0].value
                call = f"om_norm({p('x')}, {vec(task.kind.value)}, {p(made)})"
            case k.QKV:
                call = f"om_qkv(s, l, {lo}, {hi}, {mat('qkv')}, {vec('qkv_bias')}, {p(h)}, {turn})"
            case k.QKV_ROWS:
                call = (
                    f"om_rows({mat('qkv')}, {vec('qkv_bias')}, {lo}, {hi}, OM_HIDDEN_CHUNKS, "
                    f"{p(h)}, OM_X_STRIDE, {p('raw')}, {self.pages['raw'].stride})"
                )
            case k.ROPE:
                raw = f"{p('raw')} + {lo * self.s.group_rows}, {self.pages['raw'].stride}"
                call = f"om_rope(s, l, {lo}, {hi}, {raw}, {turn})"
            case k.ATTEND:
                part = p("part") if "part" in self.pages else "NULL"
                call = (
                    f"om_attend(s, l, {task.slot}, {lo}, {task.split}, {p('q')}, {p('attn')}, "
                    f"{part})"
                )
            case k.COMBINE:
                call = f"om_combine({task.slot}, {lo}, {p('part')}, {p('attn')})"
            case k.O | k.DOWN:
                name, source = task.kind.value, "attn" if task.kind is k.O else "act"
                call = (
                    f"om_residual({mat(name)}, {vec(name + '_bias')}, {lo}, {hi}, "
                    f"OM_{name.upper()}_CHUNKS, {p(source)}, {self.pages[source].stride}, {p('x')})"
                )
            case k.UP:
                call = f"om_up({mat('up')}, {vec('up_bias')}, {lo}, {hi}, {p(h)}, {p('act')})"
            case k.HEAD:
                call = (
                    f"om_head(s, {mat('head')}, {lo}, {hi}, {task.index}, {p(h)}, {p('logits')}, "
                    f"{p('best')})"
                )
            case k.SAMPLE:
                call = f"om_sample(s, s->room, {p('logits')}, {p('best')}, {p('token')})"
        code = f"{list(TaskKind).index(task.kind)} * 4096 + {'l' if task.layer >= 0 else 0}"
        return [f"OM_RUN({core}, {code}, {call});", *self.records(task), *self.checks(task, core)]

    def records(self, task: Task) -> list[str]:
        """Recording: copies of what the task wrote (of copied norms, the first core's)."""
        out = []
        for r in TABLE[task.kind].writes(self.s, task) if task.core <= 0 else ():
            if r.value in _NO_PROBE:
                continue
            at, width = self.probes.places[f"{task.kind}:{r.value}"]
            to = f"{at} + l * {self.probes.layer}" if task.layer >= 0 else str(at)
            rows = f"{r.lo}, {min(r.hi, width)}, {r.slot}"
            out.append(
                f"if (s->l->record) om_copy(s->l->record + {to}, {width}, {self.page(r.value)}, "
                f"{self.pages[r.value].stride}, {rows});"
            )
        return out

    def checks(self, task: Task, core: int) -> list[str]:
        """Debugging: results that are not finite, named by kind and layer."""
        if task.kind in (TaskKind.SAMPLE, TaskKind.HEAD, TaskKind.ATTEND, TaskKind.EMBED):
            return []
        kind = list(TaskKind).index(task.kind)
        layer = "l" if task.layer >= 0 else "0"
        out = []
        for r in TABLE[task.kind].writes(self.s, task):
            if r.value in ("keys", "values", "part"):
                continue
            rows = f"{r.lo}, {min(r.hi, self._true(r))}, {r.slot}"
            out.append(
                f"if (s->l->debug && om_finite(s, {self.page(r.value)}, "
                f"{self.pages[r.value].stride}, {rows}, {core}, e, {kind} * 4096 + {layer})) "
                "return;"
            )
        return out

    def _true(self, r: Region) -> int:
        m = self.s.model
        if r.value[0] == "h" or r.value == "x":
            return m.hidden
        return {"q": m.q_width, "attn": m.q_width, "act": m.ffn}.get(r.value, r.hi)


def _label(name: str) -> str:
    """A name without its layer."""
    base, _, group = _split(name)
    return f"{base} of group {group}" if "." in name else base


def _relabel(item: Item, layer: int) -> Item:
    """An item of any layer as the same item of `layer`."""
    match item:
        case Run(t):
            return Run(Task(t.kind, layer, t.lo, t.hi, t.slot, t.split, t.core, t.index))
        case Signal(name):
            return Signal(_moved(name, layer))
        case Await(name, count):
            return Await(_moved(name, layer), count)
        case Barrier(name):
            return Barrier(_moved(name, layer))


def _moved(name: str, layer: int) -> str:
    base, _, rest = name.partition("@")
    _, dot, group = rest.partition(".")
    return f"{base}@{layer}{dot}{group}"


def fold(program: Sequence[Item], layers: int) -> tuple[list[Item], list[Item], list[Item]]:
    """Prologue, the items of layer 0, epilogue; raises `InternalError` when layers differ."""
    levels = [_item_layer(i) for i in program]
    inner = [i for i, level in enumerate(levels) if level >= 0]
    if not inner:
        return list(program), [], []
    first, last = inner[0], inner[-1] + 1
    body = [i for i, level in zip(program, levels, strict=True) if level == 0]
    unrolled = [_relabel(i, layer) for layer in range(layers) for i in body]
    if unrolled != list(program[first:last]):
        raise InternalError("the layers of a schedule are not alike: they cannot be one loop")
    return list(program[:first]), body, list(program[last:])


def _program(printer: _Printer, core: int, sampler: int) -> list[str]:
    layers = printer.s.model.layers
    before, body, after = fold(printer.schedule.programs[core], layers)
    lines = [
        f"static void om_core_{core}(om_state *s) {{",
        "  float *const m = s->l->scratch;",
        "  unsigned met = 0;",
        "  (void)m, (void)met;",
        "  for (unsigned e = 0; (int)e < s->l->steps && s->more; e++) {",
    ]
    lines += ["    " + x for item in before for x in printer.item(item, core)]
    lines += [
        "    for (long l = 0; l < OM_LAYERS; l++) {",
        "      const char *const w = s->l->weights + OM_LAYER_OFFSET + l * (long)OM_LAYER_BYTES;",
        "      (void)w;",
    ]
    lines += ["      " + x for item in body for x in printer.item(item, core)]
    lines += ["    }"]
    lines += ["    " + x for item in after for x in printer.item(item, core)]
    if core == sampler:
        lines.append("    om_signal(&s->step_done);")
    else:
        lines.append(
            f"    if (om_wait(s, &s->step_done, e + 1, {core}, e, {END_OF_STEP}, 1)) return;"
        )
    return [*lines, "  }", "}"]


END_OF_STEP = -4096


def _formats(work: Workload) -> list[str]:
    """The products in use: of the layers' format, and of the embedding's and the head's."""
    form, out = work.weights, []
    if form in (WeightFormat.INT8, WeightFormat.W4A16):
        out.append("#if OM_VNNI\n" + _text("digits.h") + "#endif")
    if form is WeightFormat.W4A16:
        out.append(_text("words.h"))
    plain = sorted({form, form.outer, work.head_form} - {WeightFormat.W4A16})
    for f in plain:
        text = f"OM_PRODUCT({f.value}, {int(f is WeightFormat.INT8)})"
        if f is WeightFormat.INT8:
            text = f"#if !OM_VNNI\n{text}\n#endif"
        out.append(text)
    for prefix, f, rows in (("", form, form), ("outer_", work.head_form, form.outer)):
        names = (("product", f), ("enter", f), ("row", rows))  # a row is the embedding's
        out += [f"#define om_{prefix}{n} om_{n}_{of.value}" for n, of in names]
        out.append(f"#define OM_{prefix.upper()}ROOM OM_ROOM_{f.value}")
    return out


def emit_cpu(schedule: Schedule, weights: WeightLayout) -> Emitted:
    """The C program of a schedule (which must have passed `schedule.check`)."""
    edges, counters = _edges(schedule)
    barriers = tuple(
        dict.fromkeys(
            _label(i.name) for p in schedule.programs for i in p if isinstance(i, Barrier)
        )
    )
    sampler = next(
        c for c, p in enumerate(schedule.programs)
        if any(isinstance(i, Run) and i.task.kind is TaskKind.SAMPLE for i in p)
    )  # fmt: skip
    probes = _probes(schedule)
    printer = _Printer(schedule, weights, edges, barriers, probes)
    s = schedule.shape
    title = (
        f"/* One decode step of {s.model.family} ({s.model.layers} layers, hidden "
        f"{s.model.hidden}), batch {s.batch}, context {s.work.context}, {s.work.said}; "
        f"{schedule.cores} threads, synchronised by {schedule.sync}s. */"
    )
    parts = [
        title, "#define _GNU_SOURCE 1", f"#define OB_LANES {s.lanes}",
        *_defines(schedule, weights, counters),
        lower_runtime("vector.h"), _text("state.h"), _text("weights.h"), *_formats(s.work),
        _text("tasks.h"), _text("sample.h"),
    ]  # fmt: skip
    for core in range(schedule.cores):
        parts += _program(printer, core, sampler)
    names = ", ".join(f"om_core_{c}" for c in range(schedule.cores))
    parts += [f"static void (*const om_programs[OM_CORES])(om_state *) = {{{names}}};"]
    parts += [_text("launch.h")]
    source = "\n".join(parts) + "\n"
    return Emitted(source, edges, barriers, digest("mega", source), probes)
