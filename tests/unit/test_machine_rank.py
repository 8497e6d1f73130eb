"""The cost model ranks hand-made candidates as measurements do, on a CPU and an H200."""

from __future__ import annotations

import numpy as np
import pytest
from tests import machine_candidates as mc

from obelisk.ir import BlockBuilder, DType, Graph, make_graph, random_inputs, run
from obelisk.ir import build as b
from obelisk.machine import Machine, capacity, estimate, find, roofline
from obelisk.machine.gpu import matmul_seconds

CPU, H200 = find("x86-64-v3"), find("h200")
F32, F16 = DType.F32, DType.F16
GQA = mc.attention_shapes(1, 2, 256, 4096, 64)
SMALL = mc.attention_shapes(1, 2, 16, 64, 8)
BOTH = pytest.mark.parametrize(("machine", "dtype"), [(CPU, F32), (H200, F16)], ids=["cpu", "h200"])


def seconds(graph: Graph, machine: Machine) -> float:
    return estimate(graph, machine).seconds


@pytest.mark.parametrize(
    ("plain", "other"),
    [
        (mc.attention_plain(SMALL, F32), mc.attention_fused(SMALL, F32, 4, 4)),
        (mc.attention_plain(SMALL, F32), mc.attention_split(SMALL, F32, 2, 4, 2)),
        (mc.norm_linear_plain(3, 32, 48, F32), mc.norm_linear_two(3, 32, 48, 4, 4, F32)),
        (mc.norm_linear_plain(3, 32, 48, F32), mc.norm_linear_fused(3, 32, 48, 4, 4, F32)),
        (mc.gated_plain(3, 32, 48, F32), mc.gated_fused(3, 32, 48, 4, 4, F32)),
        (mc.lora_plain(F32, 3, 16, 24, 4), mc.lora_fused(F32, 6, 3, 16, 24, 4)),
    ],
)
def test_candidates_compute_their_program(plain: Graph, other: Graph) -> None:
    """The data of this file are what they say: each candidate equals its program in float64."""
    arrays = random_inputs(plain, seed=1, scale=0.3)
    for want, got in zip(run(plain, arrays), run(other, arrays), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-12)


def best(candidates: list[Graph], machine: Machine) -> float:
    """The least predicted seconds of those that fit."""

    def fits(graph: Graph) -> bool:
        return not any(capacity(x.block, machine) for x in graph.launches() if x.block)

    fit = [g for g in candidates if fits(g)]
    assert fit
    return min(seconds(g, machine) for g in fit)


@BOTH
def test_fused_attention_beats_op_by_op(machine: Machine, dtype: DType) -> None:
    """The best fused or split candidate is at least a quarter faster than five kernels."""
    fused = [mc.attention_fused(GQA, dtype, r, x) for r in (1, 2, 4, 8, 16) for x in (16, 64)]
    split = [mc.attention_split(GQA, dtype, r, 4, x) for r in (4, 16) for x in (2, 8)]
    plain = seconds(mc.attention_plain(GQA, dtype), machine)
    assert best(fused + split, machine) < 0.75 * plain


def test_attention_on_a_gpu_needs_key_splits() -> None:
    """Measured on an H200: 16 key splits and a combine kernel win; few blocks leave SMs idle."""
    split = best([mc.attention_split(GQA, F16, 16, s, 4) for s in (4, 16)], H200)
    fused = best([mc.attention_fused(GQA, F16, r, 64) for r in (8, 16, 64)], H200)
    assert split < 0.6 * fused
    assert 5e-6 < split < 20e-6  # measured: 10.8 us


@pytest.mark.parametrize(
    ("machine", "dtype", "rows"), [(CPU, F32, 2), (H200, F16, 2), (H200, F16, 16)]
)
def test_fused_norm_beats_two_kernels(machine: Machine, dtype: DType, rows: int) -> None:
    """The same grid and loop, with and without a norm kernel in front, and op by op.

    With 16 rows on a CPU both take the same time: the norm is made again in each block.
    """
    parts = 2 if machine is CPU else 192
    fused = seconds(mc.norm_linear_fused(rows, 4096, 6144, parts, 16, dtype), machine)
    two = seconds(mc.norm_linear_two(rows, 4096, 6144, parts, 16, dtype), machine)
    plain = seconds(mc.norm_linear_plain(rows, 4096, 6144, dtype), machine)
    assert fused < two < plain


@BOTH
def test_fused_gated_mlp_beats_op_by_op(machine: Machine, dtype: DType) -> None:
    """Two accumulators in one kernel against four kernels."""
    parts = 2 if machine is CPU else 128
    fused = seconds(mc.gated_fused(8, 4096, 4096, parts, 16, dtype), machine)
    assert fused < 0.95 * seconds(mc.gated_plain(8, 4096, 4096, dtype), machine)


@BOTH
def test_gated_mlp_wants_wide_column_tiles(machine: Machine, dtype: DType) -> None:
    """With 8 rows a block of 4 columns reads lines that it does not use: at least twice slower."""
    wide = 4 if machine is CPU else 128  # tiles of 1024 or of 32 columns
    good = seconds(mc.gated_fused(8, 4096, 4096, wide, 16, dtype), machine)
    assert seconds(mc.gated_fused(8, 4096, 4096, 1024, 16, dtype), machine) > 2 * good


@BOTH
def test_lora_in_one_kernel(machine: Machine, dtype: DType) -> None:
    """Making X A again in every block is cheaper than three more launches."""
    parts = 2 if machine is CPU else 128
    fused = seconds(mc.lora_fused(dtype, parts), machine)
    assert fused < 0.9 * seconds(mc.lora_plain(dtype), machine)


def test_predictions_on_an_h200_are_near_measurements() -> None:
    """Within a factor of 1.7 of what was measured for hand-written kernels of these structures."""
    measured = [
        (mc.gated_fused(8, 4096, 4096, 128, 16, F16), 19.2e-6),  # N tile 32, K tile 256
        (mc.gated_plain(8, 4096, 4096, F16), 31.2e-6),  # eager, in a graph
        (mc.lora_fused(F16, 128), 3.7e-6),
        (mc.lora_plain(F16), 10.9e-6),
        (mc.attention_split(GQA, F16, 16, 16, 4), 10.8e-6),
        (mc.attention_plain(GQA, F16), 28.7e-6),
        (mc.norm_linear_plain(2, 4096, 6144, F16), 21.9e-6),
    ]
    for graph, want in measured:
        got = seconds(graph, H200)
        assert want / 1.7 < got < want * 1.7, (graph.name, got, want)


def test_one_block_on_two_cores_takes_twice_as_long() -> None:
    """Bound by compute (a product) and by memory (x + 1): one block leaves half the cores idle."""
    for make in (
        lambda parts: mc.square_matmul(512, 512, 512, (parts, 1), 1, F32),
        lambda parts: mc.add_one(1 << 20, parts, F32),
    ):
        ratio = seconds(make(1), CPU) / seconds(make(2), CPU)
        assert 1.8 < ratio < 2.2


@BOTH
def test_imbalance_costs_a_wave(machine: Machine, dtype: DType) -> None:
    """One block more than the cores hold in whole waves costs most of a wave."""

    def product(parts: int) -> Graph:
        x, w = b.input_node(0, (64 * parts, 512), dtype), b.input_node(1, (512, 128), dtype)
        bb = BlockBuilder((parts,), 4)
        bb.store(b.accum_sum(bb.load(x, (0,), 1) @ bb.load(w, (None,), 0)), (0,), dtype=dtype)
        return make_graph([x, w], bb.launch())

    full, spill = 2 * machine.cores, 2 * machine.cores + 1
    per_block = estimate(product(machine.cores), machine).per_launch[0].compute_seconds
    more = estimate(product(spill), machine).per_launch[0].compute_seconds
    assert more - estimate(product(full), machine).per_launch[0].compute_seconds > 0.2 * per_block


@BOTH
def test_too_fine_a_cut_is_slow(machine: Machine, dtype: DType) -> None:
    """Sixteen thousand blocks of 64 elements, or tiles of one column, lose to a few large ones."""
    coarse = 64 if machine is CPU else 1024
    add = {p: seconds(mc.add_one(1 << 20, p, dtype), machine) for p in (coarse, 16384)}
    assert add[16384] > (1.05 if machine is CPU else 2) * add[coarse]
    fine = seconds(mc.square_matmul(512, 512, 512, (128, 128), 1, dtype), machine)
    good = seconds(mc.square_matmul(512, 512, 512, (8, 8), 1, dtype), machine)
    assert fine > 2 * good


@BOTH
def test_many_tiny_iterations_are_slow(machine: Machine, dtype: DType) -> None:
    """A loop of 512 single steps of k loses to 4 of 128."""
    good = seconds(mc.square_matmul(512, 512, 512, (8, 8), 4, dtype), machine)
    assert seconds(mc.square_matmul(512, 512, 512, (8, 8), 512, dtype), machine) > 1.5 * good


def test_register_tiles_of_a_cpu_want_whole_vectors_and_rows() -> None:
    """Padding waste: 9 columns cost as much as 16, and a single row wastes the accumulators."""

    def compute(m: int, n: int) -> float:
        graph = mc.square_matmul(m, n, 256, (1, 1), 1, F32)
        return estimate(graph, CPU).per_launch[0].compute_seconds

    assert compute(48, 9) > 0.9 * compute(48, 16)
    assert compute(48, 1) * 4 > compute(48, 8)  # a column alone costs a vector
    per_row = compute(1, 8), compute(48, 8) / 48
    assert per_row[0] > 1.5 * per_row[1]


def test_tensor_core_tiles_are_padded_on_a_gpu() -> None:
    """One row costs as much tensor-core time as sixteen."""
    one, sixteen = (matmul_seconds(1, m, 256, 256, F16, H200) for m in (1, 16))
    assert one == sixteen
    assert matmul_seconds(1, 17, 256, 256, F16, H200) > 1.1 * sixteen


def test_cost_is_the_sum_of_its_launches() -> None:
    """The breakdown adds up and says what bounds each launch."""
    cost = estimate(mc.attention_plain(GQA, F32), CPU)
    assert cost.launches == len(cost.per_launch) == 5
    assert cost.seconds == pytest.approx(sum(p.seconds for p in cost.per_launch))
    assert cost.bytes == pytest.approx(sum(p.bytes for p in cost.per_launch))
    assert cost.flops == pytest.approx(sum(p.flops for p in cost.per_launch))
    assert cost.per_launch[0].limit == "compute"
    assert "matmul f32[2, 256, 4096]" in str(cost)
    assert "bound by compute" in str(cost)


def _family(name: str, dtype: DType) -> list[Graph]:
    """A program and two candidates."""
    if name == "attention":
        fused = mc.attention_fused(GQA, dtype, 4, 16)
        return [mc.attention_plain(GQA, dtype), fused, mc.attention_split(GQA, dtype, 4, 4, 4)]
    if name == "rmsnorm":
        shape = (2, 4096, 6144)
        fused = [mc.norm_linear_fused(*shape, parts, 16, dtype) for parts in (2, 96)]
        return [mc.norm_linear_plain(*shape, dtype), *fused]
    return [mc.lora_plain(dtype), mc.lora_fused(dtype, 2), mc.lora_fused(dtype, 64)]


@BOTH
@pytest.mark.parametrize("name", ["attention", "rmsnorm", "lora"])
def test_nothing_is_predicted_below_the_roofline(machine: Machine, dtype: DType, name: str) -> None:
    """The floor of a program is below its own estimate and that of every candidate."""
    program, *candidates = _family(name, dtype)
    floor = roofline(program, machine)
    assert floor > 0
    for graph in (program, *candidates):
        assert seconds(graph, machine) >= floor


def test_roofline_of_a_stream_is_bytes_over_bandwidth() -> None:
    """x + 1 over 4 MB: 8 MB moved; a fused candidate has the same floor."""
    graph = mc.add_one(1 << 20, 4, F32)
    assert roofline(graph, H200) == pytest.approx(8 * (1 << 20) / 4.8e12)
    cached = CPU.caches[-1].bandwidth * CPU.cores  # 4 MB stay in 16 MB between calls
    assert roofline(graph, CPU) == pytest.approx(8 * (1 << 20) / cached)


def test_launches_cost_time() -> None:
    """Two independent small kernels cost at least two launches."""
    x = b.input_node(0, (8, 8), F16)
    graph = make_graph([x], [b.exp(x), b.tanh(x)])
    cost = estimate(graph, H200)
    assert cost.launches == 2
    assert cost.seconds > 2 * H200.launch_seconds
    assert all(p.limit == "launch" for p in cost.per_launch)


def test_estimates_do_not_depend_on_history() -> None:
    """The same graph gives the same cost before and after others filled the caches."""
    graph = mc.gated_fused(8, 4096, 4096, 8, 16, F32)
    first = estimate(graph, CPU)
    for parts in (1, 2, 4, 16, 32):
        estimate(mc.gated_fused(8, 4096, 4096, parts, 16, F32), CPU)
    assert estimate(mc.gated_fused(8, 4096, 4096, 8, 16, F32), CPU) == first
