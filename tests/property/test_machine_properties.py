"""Laws that hold for any graph: costs are finite and additive, footprints bounded, floors below."""

from __future__ import annotations

from dataclasses import replace
from math import isfinite

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import machine_candidates as mc
from tests.strategies import blocked_pairs, kernel_graphs, zoo_graphs

from obelisk.ir import DType, Graph, make_graph
from obelisk.machine import Machine, MachineKind, estimate, find, footprint, roofline
from obelisk.machine.footprint import arena, residence, value_bytes

MACHINES = [find(n) for n in ("x86-64-v3", "x86-64-v4", "aarch64", "a100", "rtx4090", "h200")]
machines = st.sampled_from(MACHINES)


@settings(max_examples=60, deadline=None)
@given(st.one_of(kernel_graphs, zoo_graphs, blocked_pairs.map(lambda p: p.candidate)), machines)
def test_every_graph_has_a_finite_additive_cost(graph: Graph, machine: Machine) -> None:
    """Positive finite seconds; the total is the sum of the launches; twice gives the same."""
    cost = estimate(graph, machine)
    assert cost.launches == len(cost.per_launch) >= len(graph.launches())
    assert isfinite(cost.seconds)
    assert cost.seconds == pytest.approx(sum(p.seconds for p in cost.per_launch))
    for part in cost.per_launch:
        assert part.seconds >= max(part.memory_seconds, part.compute_seconds, part.launch_seconds)
        assert part.seconds > 0
        assert part.waves >= 1
        assert part.limit in str(part)
    assert estimate(graph, machine) == cost


@settings(max_examples=60, deadline=None)
@given(st.one_of(zoo_graphs, blocked_pairs.map(lambda p: p.candidate)))
def test_footprints_lie_between_the_largest_value_and_the_sum(graph: Graph) -> None:
    """Peak live bytes are at least the largest load and at most all values with a spare maximum."""
    for launch in graph.launches():
        if launch.block is None:
            continue
        sizes = [value_bytes(n) for n in launch.block.body]
        largest = max(value_bytes(n) for n in launch.block.loads)
        peak = footprint(launch.block)
        assert largest <= peak <= 2 * sum(sizes)
        need = residence(launch.block)
        assert need.tiles <= need.peak
        assert need.peak - need.tiles <= need.accumulators
        narrow = 2 * sum(n.nbytes for n in launch.block.loads)
        assert arena(launch.block) <= peak + 4 * narrow


@settings(max_examples=40, deadline=None)
@given(kernel_graphs, machines)
def test_a_better_machine_is_never_slower(graph: Graph, machine: Machine) -> None:
    """Twice the bandwidth, or half the launch cost, never raises a prediction."""
    base = estimate(graph, machine).seconds
    wide = replace(
        machine, bandwidth=2 * machine.bandwidth, core_bandwidth=2 * machine.core_bandwidth
    )
    assert estimate(graph, wide).seconds <= base * (1 + 1e-12)
    quick = replace(machine, launch_seconds=machine.launch_seconds / 2)
    assert estimate(graph, quick).seconds <= base


@settings(max_examples=40, deadline=None)
@given(kernel_graphs, machines)
def test_floor_is_below_the_estimate(graph: Graph, machine: Machine) -> None:
    """No program of single operators is predicted to run under its roofline."""
    assert 0 <= roofline(graph, machine) <= estimate(graph, machine).seconds


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 32), st.integers(1, 32), st.integers(1, 8), machines)
def test_more_work_costs_more(rows: int, columns: int, depth: int, machine: Machine) -> None:
    """A product that is larger in every dim never costs less, with the same grid and loop."""
    dtype = DType.F32 if machine.kind is MachineKind.CPU else DType.F16
    small = mc.square_matmul(64 * rows, 64 * columns, 256 * depth, (2, 2), 2, dtype)
    large = mc.square_matmul(128 * rows, 128 * columns, 512 * depth, (2, 2), 2, dtype)
    assert estimate(large, machine).seconds > estimate(small, machine).seconds


@settings(max_examples=30, deadline=None)
@given(kernel_graphs, machines)
def test_an_output_more_never_costs_less(graph: Graph, machine: Machine) -> None:
    """Dropping all outputs but the first cannot raise the cost."""
    first = make_graph(graph.inputs, graph.outputs[:1], graph.input_names)
    assert estimate(first, machine).seconds <= estimate(graph, machine).seconds * (1 + 1e-12)
