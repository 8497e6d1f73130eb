"""The IR of GPU schedules: dialects read back, every pass keeps what it must and does what it
says.
"""

from __future__ import annotations

import itertools
import random

import pytest
from tests.gpu_schedules import bf16, gpu_model, small_step
from xdsl.dialects.builtin import ModuleOp

from obelisk.base.errors import Infeasible, MalformedGraph, ParseError, UnknownName
from obelisk.machine import find
from obelisk.schedule.gpu import shared_plan
from obelisk.schedule.gpu_choice import Fusion
from obelisk.schedule.gpu_default import default_tiling
from obelisk.schedule.gpu_tasks import GpuKind, GpuStep
from obelisk.schedule.ir import (
    STAGES,
    Setting,
    parse_module,
    print_module,
    run,
    schedule_of,
    text_after,
)
from obelisk.schedule.ir.dialects import OperatorOp, PageOp, RepeatOp, SyncOp
from obelisk.schedule.ir.memory import edges
from obelisk.schedule.ir.micro import ahead, chunk_cycles, micro_operations, nodes, span_of
from obelisk.schedule.ir.ordering import Node, critical_path, list_schedule, live_registers
from obelisk.schedule.ir.passes import phases, shares

H200 = find("h200")


def setting(name: str = "Llama-3.2-1B", fusion: Fusion = Fusion(), registers: int = 168) -> Setting:  # noqa: B008 (frozen)
    """The default tiling of a real model."""
    model = gpu_model(name)
    step = GpuStep(model, bf16(), default_tiling(model, bf16(), H200))
    return Setting(step, fusion, registers)


def kinds(module: ModuleOp) -> list[str]:
    """Operators in order of text."""
    return [op.kind.data for op in module.walk() if isinstance(op, OperatorOp)]


def grouped(module: ModuleOp) -> dict[str, list[str]]:
    """Phases and the operators in each."""
    return {p.phase.data: [o.kind.data for o in p.operators()] for p, _ in phases(module)}


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_prints_and_reads_back(stage: str) -> None:
    """Parse of print is the same text, after each pass; equal arguments give equal text."""
    rng = random.Random(3)
    for at in (setting("Qwen3-0.6B"), Setting(small_step(rng)), Setting(small_step(rng))):
        text = text_after(at, stage)
        assert print_module(parse_module(text)) == text
        assert text_after(at, stage) == text


def test_what_is_no_module_and_what_breaks_a_rule_are_told_apart() -> None:
    """Text that does not parse; a wrong arity, an unknown operator, a page within 16 bytes."""
    text = text_after(setting(), "sync")
    with pytest.raises(ParseError, match="is no module"):
        parse_module(text[: len(text) // 2])
    for right, wrong in (
        ('kind = "norm"', 'kind = "gate_of_hell"'),
        ('kind = "gate"', 'kind = "add"'),
        ('form = "tagged"', 'form = "hope"'),
        ('memory = "device", offset = 0', 'memory = "device", offset = 8'),
        ("count = 16 : i64", "count = 0 : i64"),
        ("chunk = 8192 : i64", "chunk = 8190 : i64"),
    ):
        assert right in text
        with pytest.raises(MalformedGraph, match="breaks a rule"):
            parse_module(text.replace(right, wrong, 1))
    with pytest.raises(UnknownName, match="known are operators, split"):
        text_after(setting(), "magic")


def test_operators_are_the_step_in_order() -> None:
    """One layer, repeated; what stands before and behind it."""
    module = run(setting(), "operators")
    assert kinds(module) == [
        "token", "embed", "norm", "product", "rotate", "append", "attend", "combine", "product",
        "add", "norm", "product", "gate", "product", "add", "norm", "product", "best", "sample",
    ]  # fmt: skip
    repeat = next(op for op in module.walk() if isinstance(op, RepeatOp))
    assert repeat.count.value.data == 16


def test_split_leaves_parts_and_joins_them_where_they_are_read() -> None:
    """Each residual addition gives `parts` times the rows; a join stands before every norm, and the
    value that goes round the layers is the parts.
    """
    at = setting("Qwen3-0.6B")
    t = at.tiling
    assert t.o_split > 1 or t.down_split > 1
    module = run(at, "split")
    adds = [o for o in module.walk() if isinstance(o, OperatorOp) and o.kind.data == "add"]
    widths = [o.outputs[0].type.width.data for o in adds]
    assert widths == [1024 * t.o_split, 1024 * t.down_split]
    listed = kinds(module)
    assert all(listed[i - 1] == "join" for i, k in enumerate(listed) if k == "norm")
    assert listed.count("join") == 3
    repeat = next(op for op in module.walk() if isinstance(op, RepeatOp))
    assert repeat.outputs[0].type.storage.data == "down"
    bad = Setting(GpuStep(at.step.model, bf16(), default_tiling(at.step.model, bf16(), H200)))
    object.__setattr__(bad.step.tiling, "down_split", 7)
    with pytest.raises(Infeasible, match="down: 3072 columns cannot be split in 7"):
        run(bad, "split")


def test_fuse_groups_what_the_choice_says_and_loses_nothing() -> None:
    """The emitted phases, and those of every other fusion; operators keep their order."""
    emitted = grouped(run(setting(), "fuse"))
    assert emitted == {
        "embed": ["embed"], "qkv": ["join", "norm", "product"],
        "attend": ["rotate", "append", "attend"], "o": ["combine", "product", "add"],
        "up": ["join", "norm", "product", "gate"], "down": ["product", "add"],
        "head": ["join", "norm", "product", "best"], "choose": ["sample"],
    }  # fmt: skip
    order = [k for k in kinds(run(setting(), "split"))]
    for flags in itertools.product((False, True), repeat=4):
        fusion = Fusion(*flags)
        module = run(setting(fusion=fusion), "fuse")
        names = grouped(module)
        assert kinds(module) == order
        assert ("rope" in names) == fusion.rope_apart
        assert ("combine" in names) == fusion.combine_apart
        assert ("up+down" in names) == fusion.down_behind_up
    apart = setting(fusion=Fusion(rope_apart=True))
    with pytest.raises(Infeasible, match="no phase 'rope'"):
        schedule_of(apart)


def test_tile_deals_every_piece_once_and_nearly_equally() -> None:
    """Shares of a phase differ by one piece at most and add up to the matrix."""
    for name in ("Llama-3.2-1B", "SmolLM2-135M", "Qwen3-8B"):
        at = setting(name)
        for phase, _ in phases(run(at, "tile")):
            dealt = shares(phase)
            if phase.phase.data in ("embed", "choose"):
                assert dealt == []
                continue
            assert max(dealt) - min(dealt) <= 1
            assert sum(dealt) == at.step.units[GpuKind(phase.phase.data)]
            if phase.chunk is not None:
                assert phase.chunk.value.data == at.tiling.chunk_bytes


def test_micro_operations_read_each_byte_of_a_chunk_and_release_it_last() -> None:
    """As many fragments as a chunk has 512 bytes; the release waits for all of them."""
    at = setting()
    for phase, _ in phases(run(at, "micro")):
        ops = micro_operations(phase)
        if phase.chunk is None:
            continue
        count = sum(op.name == "micro.fragment" for op in ops)
        assert count * 512 == at.tiling.chunk_bytes
        dag = nodes(ops)
        release = next(i for i, op in enumerate(ops) if op.name == "micro.release")
        fragments = [i for i, op in enumerate(ops) if op.name == "micro.fragment"]
        assert set(dag[release].after) == set(fragments)
        roles = {op.name: op.role.data for op in ops}
        assert roles["micro.copy"] == "loader"
        assert {r for n, r in roles.items() if n != "micro.copy"} == {"consumer"}


def test_order_keeps_the_dag_within_the_registers() -> None:
    """Fewer registers, fewer fragments ahead, no fewer cycles; too few are refused."""
    spans = []
    for registers in (80, 104, 168):
        at = setting(registers=registers)
        before = {
            p.phase.data: sorted(op.name for op in micro_operations(p))
            for p, _ in phases(run(at, "micro"))
        }
        for phase, _ in phases(run(at, "order")):
            ops = micro_operations(phase)
            if not ops:
                continue
            assert sorted(op.name for op in ops) == before[phase.phase.data]
            dag = nodes(ops)  # asserts, by positions, that operands come first
            assert all(j < i for i, n in enumerate(dag) for j in n.waits)
            assert phase.order is not None
            cycles, live, most = phase.order.get_values()
            assert live_registers(dag, range(len(dag))) == live <= registers
            assert ahead(ops) == most
            assert cycles == span_of(phase) > 0
            if phase.phase.data == "qkv":
                spans.append((cycles, most))
                assert chunk_cycles(phase, 8) >= cycles / 8
    assert [c for c, _ in spans] == sorted((c for c, _ in spans), reverse=True)
    assert [m for _, m in spans] == sorted(m for _, m in spans)
    assert spans[0] != spans[-1]
    with pytest.raises(Infeasible, match=r"need \d+ registers of a thread or more, its share is 8"):
        run(setting(registers=8), "order")


def test_inputs_are_loaded_while_the_chunk_is_awaited() -> None:
    """What needs no copy is issued before the wait, as in the kernel's text (`om_product` reads the
    inputs of a chunk into registers, then waits for its weights).
    """
    phase = next(p for p, _ in phases(run(setting(), "order")) if p.phase.data == "up")
    names = [op.name for op in micro_operations(phase) if op.role.data == "consumer"]
    wait = names.index("micro.wait")
    assert names[:wait] == ["micro.load"] * wait
    assert wait == names.count("micro.load")
    assert names.index("micro.release") > max(
        i for i, n in enumerate(names) if n == "micro.fragment"
    )


def _brute(dag: list[Node], limit: int) -> int:
    """The least cycles of any order that keeps within the registers."""
    best = 10**9
    for order in itertools.permutations(range(len(dag))):
        place = {n: i for i, n in enumerate(order)}
        if any(place[j] > place[i] for i, n in enumerate(dag) for j in n.waits):
            continue
        if live_registers(dag, order) > limit:
            continue
        start, free = [0] * len(dag), {}
        for i in order:
            ready = max((start[j] + dag[j].latency for j in dag[i].waits), default=0)
            start[i] = max(ready, free.get(dag[i].unit, 0))
            free[dag[i].unit] = start[i] + dag[i].issue
        best = min(best, max(start[i] + n.latency for i, n in enumerate(dag)))
    return best


@pytest.mark.parametrize("seed", range(20))
def test_list_scheduling_against_every_order(seed: int) -> None:
    """Small random DAGs: never below the best order or the critical path, at most twice it
    (Graham), and found whenever the written order is one.
    """
    rng = random.Random(seed)
    dag: list[Node] = []
    for i in range(6):
        earlier = [j for j in range(i) if rng.random() < 0.4]
        issue = rng.randint(1, 4)
        dag.append(Node(rng.choice("abc"), issue, issue + rng.randint(0, 6), rng.randint(0, 3),
                        tuple(earlier[:2]), tuple(earlier[2:])))  # fmt: skip
    limit = live_registers(dag, range(6))  # the order as written is one
    best = _brute(dag, limit)
    found = list_schedule(dag, limit)
    assert sorted(found.order) == list(range(6))
    assert found.registers <= limit
    assert max(critical_path(dag)) <= best <= found.cycles <= 2 * best


def test_pages_reuse_shared_memory_across_operators_and_fit_the_plan() -> None:
    """Inputs of all operators share one page, the ring keeps its own, and the end is the plan's."""
    at = setting()
    pages = [op for op in run(at, "pages").walk() if isinstance(op, PageOp)]
    shared = {p.value.data: p for p in pages if p.memory.data == "shared"}
    inputs = {p.offset.value.data for n, p in shared.items() if n.startswith("inputs.")}
    assert inputs == {0}
    assert sum(n.startswith("inputs.") for n in shared) == 5
    plan = shared_plan(at.step.model, at.step.work, at.tiling)
    end = max(p.offset.value.data + p.size.value.data for p in shared.values())
    assert end == plan.total <= H200.shared_bytes
    device = {p.value.data: p for p in pages if p.memory.data == "device"}
    for value, width in at.step.widths.items():
        assert device[value].size.value.data >= width


def test_sync_covers_every_edge_once_and_follows_the_tiling() -> None:
    """An edge between blocks is tagged or has a barrier; a block's own values need program
    order.
    """
    rng = random.Random(11)
    seen = set()
    for at in (setting(), *(Setting(small_step(rng)) for _ in range(8))):
        module = run(at, "sync")
        made = [op for op in module.walk() if isinstance(op, SyncOp)]
        listed = [(s.before.data, s.after.data, v.data) for s in made for v in s.values]
        want = [(e.before, e.after, v) for e in edges(module) for v in e.storage]
        assert sorted(listed) == sorted(want)
        for s in made:
            own = s.values.data[0].data in ("x", "token") or s.before.data == "embed"
            barrier = s.before.data in at.tiling.barriers
            form = "program" if own else "barrier" if barrier else "tagged"
            assert s.form.data == form, s
            seen.add(form)
    assert seen == {"program", "barrier", "tagged"}


def test_a_pass_that_is_left_out_shows_in_the_schedule() -> None:
    """The judge lives on what the passes made: without `sync` nobody waits, and it says so."""
    from obelisk.schedule.gpu_check import check_gpu

    at = Setting(small_step(random.Random(4)))
    from obelisk.schedule.ir.lower import lower

    assert check_gpu(lower(run(at), at.step), H200) == []
    faults = check_gpu(lower(run(at, skip=("sync",)), at.step), H200)
    assert {f.rule for f in faults} & {"race", "visibility", "value"}
