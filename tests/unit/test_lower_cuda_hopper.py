"""What sm_90 adds: products of four warps, clusters that combine in shared memory, bulk copies by a
warp of their own. Each is a choice, and other architectures keep what they have.
"""

from __future__ import annotations

import json
import re

import pytest
from tests.cuda_graphs import attention, experts, gated, norm_matmul

from obelisk.build.device import module_from_json, module_json
from obelisk.ir import DType, Graph, Node, build, make_graph
from obelisk.ir.build import BlockBuilder, input_node
from obelisk.ir.op import SizeScope
from obelisk.lower.cuda import CudaOptions, Place, TensorMap, describe, lower_cuda
from obelisk.lower.cuda.fragment import Fragments
from obelisk.lower.cuda.kernel import cluster_waves, planned
from obelisk.lower.cuda.module import scheduled
from obelisk.lower.cuda.sizes import scaled
from obelisk.lower.schedule import flatten
from obelisk.machine import find

H200 = find("h200")
OLDER = [find(n) for n in ("a100", "rtx3090", "rtx4090", "rtx5090")]
TALL = attention(2, 128, 512, 64, row_tile=64, split=2, key_tile=64)


def source(graph, machine=H200, **options) -> str:  # type: ignore[no-untyped-def]
    (kernel,) = lower_cuda(graph, machine, CudaOptions(**options)).kernels
    return kernel.source


def tile_source(graph):  # type: ignore[no-untyped-def]
    """The flattened block graph of the first launch, and how its tensors lie."""
    program, sources = scheduled(scaled(graph, CudaOptions()), H200)
    first = sources[program.calls[0].kernel]
    return flatten(first.block), first.params, first.results


def test_tall_tiles_are_multiplied_by_four_warps() -> None:
    text = source(TALL)
    assert "ob_wgmma<1>(ob_f16{}" in text
    assert "ob_mma(ob_f16{}" not in body(text)
    assert "ob_mma(ob_f16{}" in source(TALL, wgmma=False)
    low = attention(2, 32, 512, 64, row_tile=32, split=2, key_tile=64)
    assert "ob_wgmma<" not in source(low)


def test_keys_that_lie_first_are_read_along_the_depth() -> None:
    graph = attention(1, 64, 256, 64, row_tile=64, split=1, key_tile=64, transposed=True)
    text = source(graph)
    assert "ob_wgmma<0>" in text  # q k: the depth is contiguous
    assert "ob_wgmma<1>" in text  # p v: it is not


@pytest.mark.parametrize("machine", OLDER, ids=lambda m: m.arch)
def test_other_architectures_have_none_of_it(machine) -> None:  # type: ignore[no-untyped-def]
    text = source(TALL, machine, bulk=True, wgmma=True)
    assert "wgmma" not in text
    assert "ob_bulk" not in text
    assert lower_cuda(TALL, machine, CudaOptions(bulk=True)).kernels[0].maps == ()


def test_the_blocks_of_a_cluster_send_each_other_their_shares() -> None:
    module = lower_cuda(TALL, H200, CudaOptions(clusters=True))
    (kernel,) = module.kernels
    (launch,) = module.launches
    assert kernel.cluster == 2
    assert module.counters == 0
    assert [p.place for p in launch.arguments] == [Place.INPUT] * 3 + [Place.OUTPUT]
    text = body(kernel.source)
    assert text.count("ob_cluster_arrive();") == text.count("ob_cluster_wait();") == 2
    assert "ob_remote(y" in text


@pytest.mark.parametrize(
    "graph",
    [
        TALL,
        attention(2, 32, 2048, 64, row_tile=16, split=8, key_tile=64),
        norm_matmul(8, 1024, 256, parts=4, split=4, tile=64),
        gated(8, 1024, 256, parts=4, loop=4, split=4),
    ],
    ids=["tall", "short", "norm", "gated"],
)
def test_parts_lie_behind_tiles_and_what_the_groups_exchange(graph) -> None:  # type: ignore[no-untyped-def]
    """Others may send their parts while this block is still in its loop."""
    (kernel,) = lower_cuda(graph, H200, CudaOptions(clusters=True)).kernels
    plan = "\n".join(kernel.plan)
    parts = [
        (int(at), int(size))
        for size, at in re.findall(r"parts \d+ from the cluster: (\d+) bytes at (\d+)", plan)
    ]
    exchange = re.search(r"groups exchange (\d+) bytes at (\d+)", plan)
    slots = re.search(r"(\d+) slots of (\d+) bytes a group", plan)
    groups = re.match(r"(\d+) groups", plan)
    assert slots
    assert groups
    assert parts
    end = max(
        sum(map(int, exchange.groups())) if exchange else 0,
        int(slots[1]) * int(slots[2]) * int(groups[1]),
    )
    for at, size in parts:
        assert at >= end
        assert at % 16 == 0
        end = at + size
    assert end <= kernel.shared <= H200.shared_bytes


@pytest.mark.parametrize(
    ("blocks", "size", "waves"), [(132, 2, 1), (134, 2, 2), (120, 4, 1), (120, 8, 1), (128, 8, 2)]
)
def test_clusters_of_four_and_eight_cannot_use_every_sm(blocks: int, size: int, waves: int) -> None:
    assert cluster_waves(blocks, size, H200) == waves


def test_clusters_that_would_wait_for_others_are_not_made() -> None:
    """128 blocks in clusters of 8: two blocks an SM where their tiles allow it, else a counter."""
    graph = attention(4, 256, 2048, 64, row_tile=64, split=8, key_tile=64)
    (kernel,) = lower_cuda(graph, H200, CudaOptions(groups=2, bulk=False)).kernels
    assert kernel.blocks == 128
    assert kernel.cluster == 8
    assert 2 * (kernel.shared + 1024) <= H200.shared_per_core
    big = lower_cuda(graph, H200, CudaOptions(groups=4))  # 512 threads, one block an SM
    assert big.kernels[0].cluster == 1
    assert big.counters == 16


def test_the_split_axis_may_stand_anywhere_in_the_grid() -> None:
    """The blocks of a cluster are neighbours, so the split varies fastest in their numbers."""
    graph = norm_matmul(8, 1024, 256, parts=4, split=4, tile=64)
    text = source(graph, clusters=True)
    assert "const int g1 = (int)blockIdx.x % 4;" in text


def test_a_warp_of_its_own_copies_in_bulk() -> None:
    graph = norm_matmul(16, 1024, 512, parts=4, split=1, tile=64)
    plain, bulk = (lower_cuda(graph, H200, CudaOptions(bulk=b)).kernels[0] for b in (False, True))
    assert bulk.threads == plain.threads + 32
    assert bulk.maps == (
        TensorMap(0, "f16", 1024, 16, 2048, 64, 16),
        TensorMap(1, "f16", 512, 1024, 1024, 64, 64),
    )
    assert plain.maps == ()
    body = bulk.source.partition('extern "C"')[2]
    assert body.count("ob_bulk_box<false>(") == 1  # x, which all blocks read
    assert body.count("ob_bulk_box<true>(") == 1
    assert "ob_copy_tile<" not in body


@pytest.mark.parametrize(
    "graph",
    [
        norm_matmul(16, 1000, 512, parts=4, split=1, tile=64),  # a last tile that is short
        norm_matmul(16, 1024, 128, parts=4, split=1, tile=64),  # 32 columns, half a line
    ],
)
def test_tiles_that_are_no_boxes_are_copied_by_all_threads(graph) -> None:  # type: ignore[no-untyped-def]
    (kernel,) = lower_cuda(graph, H200, CudaOptions(bulk=True)).kernels
    assert kernel.maps == ()
    assert "ob_copy_tile<" in kernel.source


@pytest.mark.parametrize(
    "graph",
    [
        TALL,
        attention(3, 64, 512, 64, row_tile=64, split=2, key_tile=64, transposed=True),
        norm_matmul(16, 1024, 512, parts=4, split=2, tile=64),
        experts(2, 8, 256, parts=2, tile=64),
    ],
    ids=["tall", "keys first", "norm", "experts"],
)
def test_boxes_start_where_the_tiles_do(graph) -> None:  # type: ignore[no-untyped-def]
    """Row and column of a box give the element offset of the load, for any block and iteration."""
    call = tile_source(graph)
    work, _ = planned(*call, None, (H200, CudaOptions(bulk=True)))
    assert isinstance(work, Fragments)
    assert work.bulk
    moving = [s.node for s in work.stages.values() if s.loop]
    for number, node in enumerate(moving):
        box = work.box(node, number)
        assert box is not None
        offset = work.steps(work.load_moves(node)[1]) or "0"
        for step in range(40):
            names = {f"g{a}": step * 7 % n for a, n in enumerate(work.block.grid)}
            names["it"] = step * 5 % work.block.loop
            column, row, start = (
                int(eval(t.replace("(int)", "").replace("ll", ""), {"__builtins__": {}}, names))
                for t in (box.column, box.row, offset)
            )
            assert row * box.tensor.columns + column == start
            assert column + 64 * box.count <= box.tensor.columns
            assert row + box.tensor.box_rows <= box.tensor.rows


NORM = attention(2, 64, 512, 64, row_tile=64, split=2, key_tile=64, norm=True)


def test_scales_of_rows_are_computed_once_in_a_group() -> None:
    assert "__shared__ float scales" in source(NORM, remake=False)
    assert "__shared__ float scales" not in source(NORM, remake=False, share_scales=False)


def unsafe(*, twice: bool = False, norm_keys: bool = False) -> Graph:
    """exp(q k) rms(v) over a loop, without a peak; `twice` reads v as it is, too; `norm_keys`
    normalises k, held as (keys, dim), as well.
    """
    q = input_node(0, (64, 64), DType.F16)
    k, v = (input_node(i, (512, 64), DType.F16) for i in (1, 2))
    b = BlockBuilder((1,), 8)

    def rms(x: Node) -> Node:
        n = build.size(x, 1, SizeScope.TILE)
        return build.div(x, build.sqrt(build.div(build.sum(build.square(x), 1), n)))

    tq, tk, tv = b.load(q, (None,)), b.load(k, (None,), 0), b.load(v, (None,), 0)
    p = build.exp(build.matmul(tq, build.transpose(rms(tk) if norm_keys else tk)))
    o = build.accum_sum(build.matmul(p, rms(tv)))
    if twice:
        o = build.add(o, build.accum_sum(build.matmul(p, tv)))
    b.store(build.div(o, build.accum_sum(build.sum(p, 1))), (None,), dtype=DType.F16)
    return make_graph((q, k, v), b.launch(), name="unsafe")


def body(text: str) -> str:
    """A kernel without the header library."""
    return text[text.index('extern "C"') :]


def test_normalised_values_are_written_into_their_tile_while_the_scores_are_made() -> None:
    loop = body(source(unsafe()))
    loop = loop[loop.index("for (int it = group") :]
    order = (
        "ob_wgmma_commit", "ob_ldmatrix(", "ob_stmatrix(", "ob_operand_fence", "ob_wgmma_wait",
        "ob_group_barrier",
    )  # fmt: skip
    places = [loop.index(t) for t in order]
    assert places == sorted(places)
    assert loop.rindex("ob_wgmma_begin") > places[-1]  # p v comes behind the barrier
    assert loop.count("ob_stmatrix(") == 1


@pytest.mark.parametrize("machine", OLDER, ids=lambda m: m.arch)
def test_older_architectures_write_operands_into_tiles_too(machine) -> None:  # type: ignore[no-untyped-def]
    assert body(source(unsafe(norm_keys=True), machine)).count("ob_stmatrix(") == 1
    assert "ob_stmatrix(" not in body(source(unsafe(norm_keys=True), machine, remake=False))


def test_a_scale_never_goes_to_a_left_operand_that_has_no_bound() -> None:
    """exp(s) up to 65504 times a scale above 1 would be infinite in f16: it goes to fragments of v,
    whose products with it are what the program says.
    """
    for machine in (H200, *OLDER):
        text = body(source(unsafe(), machine, wgmma=False))
        assert "ob_times(b[i], pair" in text
        assert " * scale" not in text
    assert "ob_times" not in body(source(NORM, wgmma=False))  # exp(s - peak) has room
    assert " * scale" in body(source(NORM, wgmma=False))


def test_a_tile_that_others_read_is_left_as_it_is() -> None:
    text = body(source(unsafe(twice=True)))
    assert "ob_stmatrix(" not in text
    assert "ob_wgmma<" not in text


def test_normalised_keys_are_multiplied_by_four_warps() -> None:
    text = body(source(unsafe(norm_keys=True)))
    assert "ob_wgmma<0>" in text
    assert "ob_wgmma<1>" in text
    assert text.count("ob_stmatrix(") == 2


def test_no_product_of_a_warp_is_made_while_one_of_four_runs() -> None:
    for text in (source(unsafe()), source(unsafe(norm_keys=True)), source(NORM)):
        assert "ob_mma(" not in body(text)


def test_a_computed_left_operand_takes_the_factor_of_the_power() -> None:
    def exponential(double: bool) -> Graph:
        q, k = input_node(0, (64, 64), DType.F16), input_node(1, (512, 64), DType.F16)
        b = BlockBuilder((1,), 8)
        tq, tk = b.load(q, (None,)), b.load(k, (None,), 0)
        s = build.matmul(build.mul(tq, 0.125) if double else tq, build.transpose(tk))
        p = build.exp(s)
        b.store(build.accum_sum(build.matmul(p, tk)), (None,), dtype=DType.F16)
        return make_graph((q, k), b.launch(), name="exponential")

    computed, loaded = (body(source(exponential(x))) for x in (True, False))
    assert "* OB_LOG2E" in computed
    assert "ob_exp2(" in computed
    assert "ob_fast_exp(" not in computed
    assert "ob_fast_exp(" in loaded


def test_the_plan_names_layouts_order_pipeline_and_memory() -> None:
    options = CudaOptions(clusters=True)
    text = describe(lower_cuda(TALL, H200, options))
    for piece in (
        "in clusters of 2", "layout 'result'", "swizzled lines of 128 bytes", "slots of 16384",
        "each iteration:", "running_max along axes", "parts 0 from the cluster", "shared memory:",
    ):  # fmt: skip
        assert piece in text
    assert text == describe(lower_cuda(TALL, H200, options))
    generic = describe(lower_cuda(TALL, H200, CudaOptions(fragments=False)))
    assert "product in f32" in generic
    assert "tile of" in generic


def test_tensor_maps_survive_a_bundle() -> None:
    module = lower_cuda(TALL, H200, CudaOptions(bulk=True))
    assert module.kernels[0].maps
    data = json.loads(json.dumps(module_json(module)))
    again = module_from_json(data)
    assert [k.maps for k in again.kernels] == [k.maps for k in module.kernels]
    assert again.launches == module.launches


def test_streams_of_weights_leave_room_for_the_next_launch() -> None:
    """Half of an SM's shared memory at most, where a grid has one block for it."""
    weights = norm_matmul(2, 4096, 6144, parts=96, split=1, tile=64)
    (kernel,) = lower_cuda(weights, H200).kernels
    assert 2 * (kernel.shared + 1024) <= H200.shared_per_core
    (alone,) = lower_cuda(weights, H200, CudaOptions(resident=1)).kernels
    assert alone.shared > kernel.shared
    keys = attention(32, 16, 4096, 64, row_tile=16, split=2, key_tile=64)  # products in a chain
    assert lower_cuda(keys, H200).kernels[0].shared > H200.shared_per_core // 2


def test_a_copying_warp_leaves_registers_for_the_others() -> None:
    """13 warps at most: 128 registers each."""
    for groups in (1, 2, 3, 4):
        (kernel,) = lower_cuda(TALL, H200, CudaOptions(bulk=True, groups=groups)).kernels
        assert kernel.threads <= 13 * 32


def test_chains_of_products_that_need_their_registers_have_no_copying_warp() -> None:
    """Two tiles of 16 rows a warp, or 16 warps: a ninth or seventeenth would make them spill."""
    two = attention(2, 32, 2048, 64, row_tile=32, split=2, key_tile=64)
    assert lower_cuda(two, H200).kernels[0].maps == ()
    one = attention(2, 16, 2048, 64, row_tile=16, split=2, key_tile=64)
    assert lower_cuda(one, H200).kernels[0].maps
    assert lower_cuda(one, H200, CudaOptions(groups=16)).kernels[0].maps == ()
