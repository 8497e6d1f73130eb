"""Loops whose iterations overlap: the first product of one is begun in front of the final product
of the one before, and what must stay in order does.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from tests.cuda_graphs import attention, fused, gated
from tests.unit.test_lower_cuda_hopper import body, unsafe

from obelisk.base.errors import Infeasible
from obelisk.ir import Graph
from obelisk.lower.cuda import CudaOptions, describe, lower_cuda, variants
from obelisk.machine import Machine, find

H200 = find("h200")
OLDER = [find(n) for n in ("a100", "rtx3090", "rtx4090", "b200", "rtx5090")]
LONG = attention(2, 128, 4096, 64, row_tile=64, split=2, key_tile=64)
NORM = attention(2, 128, 4096, 64, row_tile=64, split=2, key_tile=64, norm=True)
SHORT = attention(4, 16, 2048, 64, row_tile=16, split=2, key_tile=64)
AHEAD = "const int following"


def source(graph: Graph, machine: Machine = H200, **options: int) -> str:
    (kernel,) = lower_cuda(graph, machine, CudaOptions(**options)).kernels  # type: ignore[arg-type]
    return body(kernel.source)


def parts(text: str) -> tuple[str, str, str]:
    """What comes before the overlapped loop, the loop, and what comes behind it."""
    before, _, rest = text.partition("  for (int now = group;")
    loop, _, after = rest.partition("\n  }\n")
    return before, loop, after


def in_order(text: str, *pieces: str) -> None:
    at = 0
    for piece in pieces:
        found = text.find(piece, at)
        assert found >= 0, f"{piece!r} does not follow:\n{text}"
        at = found + len(piece)


def test_products_of_two_iterations_run_beside_the_exponentials() -> None:
    before, loop, after = parts(source(LONG, groups=3, ahead=True))
    in_order(
        loop,
        "ob_barrier_wait(full + group * 32 + 8 * following, parity);",
        "const unsigned tile = tiles + following * 16384;",
        "ob_wgmma<1>(ob_f16{}, c", "ob_wgmma_commit();",  # the scores of the next iteration
        "const unsigned tile = tiles + slot * 16384;",
        "ob_wgmma<1>(ob_f16{}, sum", "ob_wgmma_commit();",  # the values of this one
        "ob_wgmma_wait_but<1>();", "ob_wgmma_settle(c", "ob_exp_below(",
        "ob_wgmma_settle(v", "ob_barrier_wait(", "ob_wgmma_wait();", "ob_wgmma_settle(sum",
        "*= decay", "ob_pack(", "ob_barrier_leave(empty + at, lane);", "slot = following;",
    )  # fmt: skip
    assert loop.count("ob_wgmma_commit();") == 2
    in_order(
        before, "int slot = 0, parity = 0;", "ob_barrier_wait(full + group * 32, 0);",
        "const int it = group;", "ob_wgmma<1>(", "ob_wgmma_wait();", "ob_exp_below(", "ob_pack(",
    )  # fmt: skip
    in_order(after, "tiles + slot * 16384;", "ob_wgmma<1>(ob_f16{}, sum", "ob_wgmma_wait();")


def test_registers_of_products_under_way_are_left_alone() -> None:
    """Between their start and their wait nothing names the sums or the left operand."""
    _, loop, _ = parts(source(LONG, groups=2, ahead=True))
    start = loop.index("ob_wgmma_wait_but<1>();")
    running = loop[start : loop.index("ob_wgmma_wait();", start)]
    (total,) = set(re.findall(r"ob_wgmma<1>\(ob_f16\{\}, (sum\d+)", loop))
    (left,) = set(re.findall(r"\{\}, sum\d+, w, 16 \* j, (a\d+)\[", loop))
    assert not re.search(rf"\b({total}|{left})\b", running)
    assert re.search(rf"\b{left}\b", loop[start:])


def test_copies_by_all_threads_wait_for_one_tile_more() -> None:
    plain = source(LONG, groups=2, bulk=0)
    ahead = source(LONG, groups=2, bulk=0, ahead=True)
    (left,) = set(re.findall(r"ob_copy_wait<(\d+)>\(\);\n    ob_operand_fence", plain))
    before, loop, _ = parts(ahead)
    assert f"ob_copy_wait<{left}>();" in before
    in_order(
        loop, f"ob_copy_wait<{int(left) - 1}>();", "ob_operand_fence();", "ob_group_barrier<128>",
        "const int next = now + 6;", "const unsigned to = tiles + (slot == 0 ? 3 : slot - 1)",
        "ob_copy_commit();", "const int it = now + 2;", "ob_wgmma<", "ob_wgmma_beside();",
        "ob_wgmma_wait();",
    )  # fmt: skip


@pytest.mark.parametrize("machine", OLDER, ids=lambda m: m.arch)
def test_products_of_a_warp_overlap_too(machine: Machine) -> None:
    text = source(SHORT, machine, groups=1, ahead=True)
    _, loop, after = parts(text)
    assert loop.count("ob_mma(") == 2
    assert after.count("ob_mma(") == 1
    in_order(loop, "ob_mma(", "tiles + slot *", "ob_mma(", "ob_exp_below(", "*= decay", "ob_pack(")
    assert "wgmma" not in text


def test_a_scale_of_rows_is_that_of_the_same_iteration() -> None:
    text = source(NORM, groups=2, ahead=True, remake=0)
    before, loop, _ = parts(text)
    assert text.count("__shared__ float scales") == 1
    assert "__shared__ float scales" in before
    in_order(loop, "ob_wgmma_wait_but<1>();", "scales", "ob_wgmma_wait();", "ob_pack(")


def test_operands_in_the_place_of_tiles_are_written_while_scores_are_made() -> None:
    _, loop, after = parts(source(unsafe(norm_keys=True), groups=1, ahead=True))
    assert loop.count("ob_stmatrix(") == 2
    assert "ob_stmatrix(" not in after
    in_order(
        loop, "ob_stmatrix(", "ob_operand_fence();", "ob_group_barrier", "ob_wgmma<0>(",
        "ob_stmatrix(", "ob_operand_fence();", "ob_wgmma<1>(",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("graph", "options"),
    [
        (gated(8, 1024, 256, parts=4, loop=4), CudaOptions()),  # no chain
        (LONG, CudaOptions(groups=2, loop_tile=128)),  # registers
        (NORM, CudaOptions(groups=3)),  # registers: a scale for each row of v
        (LONG, CudaOptions(groups=2, stages=2)),  # no slot to spare
        (fused()["attention split"], CudaOptions(groups=4)),  # an iteration a group
        (unsafe(), CudaOptions(wgmma=False)),  # scales in fragments of the right operand
    ],
    ids=["gated", "long tiles", "scales", "slots", "once", "pairs"],
)
def test_where_it_does_not_apply_the_kernel_is_as_it_was(
    graph: Graph, options: CudaOptions
) -> None:
    assert lower_cuda(graph, H200, replace(options, ahead=True)) == lower_cuda(graph, H200, options)


def test_a_pipeline_that_holds_all_tiles_needs_no_slot_to_spare() -> None:
    """Two iterations a group, two slots."""
    graph = attention(2, 64, 512, 64, row_tile=64, split=2, key_tile=64)
    text = source(graph, groups=2, ahead=True)
    assert AHEAD in text
    assert "const int following = slot == 1 ? 0 : slot + 1;" in text


@pytest.mark.parametrize("name", fused())
def test_it_is_raced_where_a_loop_has_a_chain(name: str) -> None:
    for machine in (H200, OLDER[0]):
        chosen = [o for o in variants(fused()[name], machine) if o.ahead]
        assert bool(chosen) == (name.startswith("attention many") or name == "attention whole")
        assert len(chosen) <= 3


def test_the_race_meets_overlapped_loops_of_both_kinds() -> None:
    """The tests on a device run all variants of these graphs."""
    found: set[str] = set()
    for name, graph in fused().items():
        for options in variants(graph, H200):
            try:
                kernels = lower_cuda(graph, H200, options).kernels
            except Infeasible:
                continue
            texts = [body(k.source) for k in kernels]
            found |= {f"{name} {'wgmma' if 'wgmma' in t else 'mma'}" for t in texts if AHEAD in t}
    assert found >= {
        "attention many keys wgmma", "attention many keys norm wgmma",
        "attention many keys short mma",
    }  # fmt: skip


def test_the_plan_says_so() -> None:
    line = "products of 1 begin an iteration, in front of the last one's final 1"
    assert line in describe(lower_cuda(LONG, H200, CudaOptions(groups=3, ahead=True)))
    assert line not in describe(lower_cuda(LONG, H200, CudaOptions(groups=3)))
