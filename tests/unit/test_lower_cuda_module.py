"""Lowering to CUDA: the same text every time, what is fused, what is refused by name, and rewrites
that keep the meaning.
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from tests.cuda_graphs import attention, fused, gated, low_rank, norm_matmul

from obelisk.app.loading import load_program
from obelisk.base.errors import Infeasible
from obelisk.ir import DType, Graph, build, make_graph, random_inputs, run
from obelisk.ir.build import input_node
from obelisk.ir.node import Node, make
from obelisk.ir.op import BlockAttrs, Op
from obelisk.lower.cuda import CudaOptions, Place, lower_cuda, variants
from obelisk.lower.cuda.combine import combining, gathering, split_axis
from obelisk.lower.cuda.sizes import fitting_splits, scaled
from obelisk.machine import find

H200, A100 = find("h200"), find("a100")
FUSED = fused()


@pytest.mark.parametrize("name", FUSED)
def test_fused_graphs_are_one_kernel_in_registers(name: str) -> None:
    module = lower_cuda(FUSED[name], H200)
    assert len(module.launches) == 1, module.notes
    assert all("registers" in k.notes[0] for k in module.kernels), module.notes


@pytest.mark.parametrize("name", FUSED)
def test_no_value_is_left_without_a_text_that_makes_it(name: str) -> None:
    """A loop of no steps would leave fragments as they happen to be."""
    for options in variants(FUSED[name], H200):
        try:
            module = lower_cuda(FUSED[name], H200, options)
        except Infeasible:
            continue
        for kernel in module.kernels:
            assert not re.search(r"for \(int (\w+) = 0; \1 < 0;", kernel.source), options


@pytest.mark.parametrize("name", ["attention split", "gated", "low rank odd"])
def test_text_is_the_same_every_time(name: str) -> None:
    for options in variants(FUSED[name], H200):
        try:
            one = lower_cuda(FUSED[name], H200, options)
        except Infeasible:
            continue
        assert one == lower_cuda(FUSED[name], H200, options)


def test_the_last_block_combines_with_a_counter_a_tile() -> None:
    graph = attention(2, 64, 512, 64, row_tile=32, split=4, key_tile=64)
    module = lower_cuda(graph, H200, CudaOptions(clusters=False))
    (launch,) = module.launches
    assert module.counters == 4  # two heads, two row tiles
    assert [p.place for p in launch.arguments].count(Place.COUNTER) == 1
    assert "ob_last_block(counters" in module.kernels[0].source
    apart = lower_cuda(graph, H200, CudaOptions(fuse_combine=False))
    assert len(apart.launches) == 2
    assert apart.counters == 0


def test_clusters_only_where_the_device_has_them() -> None:
    graph = attention(2, 64, 512, 64, row_tile=32, split=4, key_tile=64)
    assert lower_cuda(graph, H200).kernels[0].cluster == 4
    assert lower_cuda(graph, A100).kernels[0].cluster == 1
    assert lower_cuda(graph, H200, CudaOptions(clusters=False)).kernels[0].cluster == 1


def test_a_cpu_machine_is_refused_by_name() -> None:
    from obelisk.machine import host

    with pytest.raises(Infeasible, match="CUDA target cannot serve"):
        lower_cuda(low_rank(16, 64, 16, 64, parts=2), host())


@pytest.mark.parametrize("arch", ["sm_70", "sm_75", "sm_90", "gfx942", ""])
def test_old_and_unknown_architectures_are_refused_by_name(arch: str) -> None:
    machine = replace(H200, arch=arch)
    with pytest.raises(Infeasible, match=f"is {arch}; the CUDA target serves sm_80, "):
        lower_cuda(low_rank(16, 64, 16, 64, parts=2), machine)


PAIRS = {
    "tiles": attention(2, 64, 256, 16, row_tile=32, split=4, key_tile=32),
    "one tile": attention(3, 24, 128, 8, row_tile=24, split=2, key_tile=32),
    "depth": norm_matmul(4, 64, 48, parts=3, split=2, tile=16),
    "gated": gated(8, 64, 48, parts=3, loop=2, split=4),
}


def pair(name: str) -> tuple[Graph, Node, Node, tuple[int, ...]]:
    """A graph, its two launches, and which result of the first each param of the second is."""
    graph = PAIRS[name]
    (last,) = graph.outputs
    return graph, last.inputs[0], last, tuple(x.attrs.result for x in last.inputs)


@pytest.mark.parametrize("name", PAIRS)
def test_the_recut_combining_kernel_means_the_same(name: str) -> None:
    graph, first, last, places = pair(name)
    ending = combining(first.attrs.block, last.attrs.block, places)
    assert ending is not None
    assert ending.split == split_axis(first.attrs.block)
    other = make(Op.BLOCK, last.inputs, BlockAttrs(ending.block, 0))
    arrays = random_inputs(graph, 3)
    want = run(graph, arrays)[0]
    got = run(make_graph(graph.inputs, [other]), arrays)[0]
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)
    parts = first.attrs.block.grid[ending.split]
    assert ending.block.blocks == first.attrs.block.blocks // parts


@pytest.mark.parametrize("name", PAIRS)
def test_a_groups_parts_alone_give_its_part_of_the_result(name: str) -> None:
    graph, first, last, places = pair(name)
    block = first.attrs.block
    found = gathering(block, last.attrs.block, places)
    assert found is not None
    arrays = random_inputs(graph, 4)
    parts = run(make_graph(graph.inputs, last.inputs), arrays)
    want = run(graph, arrays)[0]
    local = [
        input_node(i, (block.grid[found.split], *block.stores[j].value.shape[1:]), x.dtype)
        for i, (j, x) in enumerate(zip(places, last.inputs, strict=True))
    ]
    alone = make_graph(local, [make(Op.BLOCK, tuple(local), BlockAttrs(found.block, 0))])
    shape = alone.outputs[0].shape
    others = [a for a in range(len(block.grid)) if a != found.split]
    for at in np.ndindex(*(block.grid[a] for a in others)):
        here = dict(zip(others, at, strict=True))
        cut = []
        for j, x, whole in zip(places, local, parts, strict=True):
            index = [slice(None)] * whole.ndim
            for a, d in enumerate(block.stores[j].omap):
                if d is not None and a != found.split:
                    index[d] = slice(here[a] * x.shape[d], (here[a] + 1) * x.shape[d])
            cut.append(whole[tuple(index)])
        target = [slice(None)] * len(shape)
        for a, d in found.places[0]:
            target[d] = slice(here[a] * shape[d], (here[a] + 1) * shape[d])
        got = run(alone, cut)[0]
        np.testing.assert_allclose(got, want[tuple(target)], rtol=2e-3, atol=1e-6)


def test_finer_loops_mean_the_same() -> None:
    graph = gated(4, 512, 32, parts=2, loop=2)
    finer = scaled(graph, CudaOptions())
    assert finer.outputs[0].attrs.block.loop == 8  # 256 deep tiles become 64 deep ones
    arrays = random_inputs(graph, 1, 0.2)
    np.testing.assert_allclose(run(finer, arrays)[0], run(graph, arrays)[0], rtol=1e-12)


@pytest.mark.parametrize(("tile", "loop"), [(0, 8), (32, 16), (128, 4), (256, 2), (512, 8)])
def test_a_loop_tile_is_what_was_asked_for(tile: int, loop: int) -> None:
    """Of 512 elements of depth in tiles of 64; one iteration alone would be no loop."""
    graph = gated(4, 512, 32, parts=2, loop=8)
    other = scaled(graph, CudaOptions(loop_tile=tile))
    assert other.outputs[0].attrs.block.loop == loop
    arrays = random_inputs(graph, 1, 0.2)
    np.testing.assert_allclose(run(other, arrays)[0], run(graph, arrays)[0], rtol=1e-12)


def test_taller_tiles_and_fewer_parts_mean_the_same() -> None:
    graph = attention(2, 128, 512, 16, row_tile=16, split=8, key_tile=32)
    other = scaled(graph, CudaOptions(row_tile=64, splits=2, loop_tile=32))
    first = other.outputs[0].inputs[0].attrs.block
    assert first.grid == (2, 2, 2)
    assert first.loop == 8
    arrays = random_inputs(graph, 1, 0.2)
    np.testing.assert_allclose(run(other, arrays)[0], run(graph, arrays)[0], rtol=1e-9, atol=1e-12)
    untouched = attention(1, 24, 64, 16, row_tile=24, split=1, key_tile=32)  # 24 rows in all
    assert scaled(untouched, CudaOptions(row_tile=64, splits=2, loop_tile=32)) is untouched


@pytest.mark.parametrize(
    ("heads", "rows", "parts"), [(2, 256, 8), (16, 256, 2), (1, 1024, 4), (60, 256, 0)]
)
def test_parts_are_as_many_as_clusters_run_at_once(heads: int, rows: int, parts: int) -> None:
    graph = attention(heads, rows, 4096, 64, row_tile=32, split=8, key_tile=64)
    assert fitting_splits(graph, H200, 64) == parts


def test_narrow_columns_are_raced_as_whole_lines() -> None:
    graph = norm_matmul(2, 4096, 6144, parts=192, split=1, tile=64)
    other = scaled(graph, CudaOptions(column_tile=64))
    assert other.outputs[0].attrs.block.grid == (96, 1)
    kernels = [k for o in variants(graph, H200) for k in lower_cuda(graph, H200, o).kernels]
    assert any(k.maps and k.blocks == 96 for k in kernels)
    keys = attention(1, 16, 512, 64, row_tile=16, split=8, key_tile=64)
    assert scaled(keys, CudaOptions(column_tile=128)) is keys  # keys are no columns of results


def test_variants_reach_tall_tiles_from_flat_ones() -> None:
    """What the search cuts into 32 rows and 8 parts is raced as 64 rows in clusters that fit."""
    graph = attention(16, 256, 4096, 64, row_tile=32, split=8, key_tile=64)
    kernels = [k for o in variants(graph, H200) for k in lower_cuda(graph, H200, o).kernels]
    assert any("ob_wgmma<" in k.source and k.cluster == 2 and k.maps for k in kernels)


def test_what_does_not_fit_registers_goes_to_shared_memory() -> None:
    """Products of f32 have no fragments; tiles above the limit of shared memory lie outside it."""
    x, y = input_node(0, (64, 96), DType.F32), input_node(1, (96, 80), DType.F32)
    module = lower_cuda(make_graph((x, y), [build.matmul(x, y)]), H200)
    assert any("in shared memory" in n for n in module.notes)
    big = load_program("attention", batch=1, dtype="f32")
    for kernel in lower_cuda(big, H200).kernels:
        assert kernel.shared <= H200.shared_bytes


def test_views_and_constants_need_no_kernel_of_their_own() -> None:
    x = input_node(0, (6, 8), DType.F16)
    y: Node = build.mul(build.transpose(x), build.const(2.0))
    module = lower_cuda(make_graph((x,), [y]), H200)
    assert len(module.launches) == 1


@pytest.mark.parametrize("name", ["gqa", "qknorm", "rmsnorm", "gated_mlp", "lora", "ntrans", "moe"])
def test_limits_of_every_architecture_hold(name: str) -> None:
    graph = load_program(name, batch=1, dtype="f16")
    for machine in ("a100", "rtx3090", "rtx4090", "h200", "b200", "rtx5090"):
        described = find(machine)
        for kernel in lower_cuda(graph, described).kernels:
            assert kernel.shared <= described.shared_bytes
            assert 32 <= kernel.threads <= described.threads_per_block


@pytest.mark.parametrize(
    ("start", "wide", "narrow"),
    [
        (0, "ob_read<8>", ""),
        (8, "ob_read<8>", ""),
        (4, "ob_read<4>", "ob_read<8>"),
        (1, "", "ob_read<"),
    ],
)
def test_a_view_that_starts_between_boundaries_is_read_in_smaller_pieces(
    start: int, wide: str, narrow: str
) -> None:
    x, w = input_node(0, (16, 128), DType.F16), input_node(1, (64, 64), DType.F16)
    view = build.slice(x, 1, start, start + 64)
    text = lower_cuda(make_graph((x,), [build.exp(view)]), H200).kernels[0].source
    body = text.partition('extern "C"')[2]
    assert wide in body
    assert not narrow or narrow not in body
    product = lower_cuda(make_graph((x, w), [build.matmul(view, w)]), H200).kernels[0].source
    body = product.partition('extern "C"')[2]
    assert ("ob_copy_any<" in body) == (start % 8 != 0)
