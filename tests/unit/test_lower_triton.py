"""Lowering to Triton: the same text every time, what the text holds, and what is refused by name.

No Triton is needed: the text is not run here (`tests/e2e/test_triton_interpreter.py` does that).
"""

from __future__ import annotations

import ast
import re

import pytest
from tests.cuda_graphs import attention, fused, gated, low_rank

from obelisk.app.loading import load_program
from obelisk.base.errors import Infeasible
from obelisk.ir import DType, Graph, KernelGraph, build, make_graph
from obelisk.ir.block import Reduce, block_graph
from obelisk.ir.build import BlockBuilder, input_node
from obelisk.lower.schedule import Operand, flatten
from obelisk.lower.triton import TritonModule, TritonOptions, lower_triton, variants
from obelisk.lower.triton.default import cut_dims, default_block
from obelisk.lower.triton.names import call_text, literal, part_line, power
from obelisk.lower.triton.padding import Padding, kept_dims
from obelisk.lower.triton.products import Products
from obelisk.lower.views import row_major
from obelisk.machine import find, host

H200, RTX3090 = find("h200"), find("rtx3090")
FUSED = fused()


def text_of(graph: Graph, options: TritonOptions | None = None) -> str:
    module = lower_triton(graph, H200, options or TritonOptions())
    return "\n".join(k.source for k in module.kernels)


def body_of(graph: Graph) -> str:
    """The statements of a module's only kernel."""
    (kernel,) = lower_triton(graph, H200).kernels
    return kernel.source[kernel.source.index("def obelisk_kernel") :]


@pytest.mark.parametrize("name", FUSED)
def test_text_is_the_same_every_time_and_parses(name: str) -> None:
    first = lower_triton(FUSED[name], H200)
    assert first == lower_triton(FUSED[name], H200)
    for kernel in first.kernels:
        ast.parse(kernel.source)
        assert max(map(len, kernel.source.splitlines())) <= 140
        assert kernel.source.count("def obelisk_kernel") == 1


def test_only_functions_that_are_called_are_there() -> None:
    g = KernelGraph("plain")
    g.output(g.add(g.input((8, 8)), 1.0))
    text = text_of(g.freeze())
    assert re.findall(r"def (\w+)", text) == ["ob_begin", "obelisk_kernel"]
    assert "import os" not in text
    text = text_of(FUSED["attention whole"])
    for name in ("ob_dot", "ob_max", "ob_larger", "ob_decay"):
        assert text.count(f"def {name}(") == 1


def test_overhang_is_masked_with_the_neutral_element() -> None:
    """48 of 64 rows of depth, 5 of 16 rows: loads give 0, a maximum sees -inf, stores skip."""
    text = body_of(FUSED["gated odd"])
    assert "mask=(r64 < 48)[:, None] & (r64 < 40)[None, :]" in text
    assert "mask=(r16 < 5)[:, None] & (r64 < 48)[None, :]" in text
    text = body_of(attention(1, 17, 100, 40, row_tile=17, split=1, key_tile=100))
    assert re.search(
        r'ob_max\(tl.where\(\(r128 < 100\)\[None, :\], \w+, float\("-inf"\)\), 1\)', text
    )
    assert re.search(r"tl.sum\(tl.where\(\(r128 < 100\)\[None, :\], \w+, 0.0\), 1\)", text)


def test_products_keep_narrow_operands_and_f32_is_not_rounded() -> None:
    text = body_of(gated(16, 128, 64, parts=1, loop=2))
    assert "t2.to" not in text  # f16 goes into the product as it was loaded
    assert "total1 = ob_dot(t2, t3, total1)" in text
    assert 'input_precision="ieee"' in text_of(gated(16, 128, 64, parts=1, loop=2))


def test_a_long_depth_is_read_bit_by_bit() -> None:
    """A tile of 694 / 2 elements of depth, which no finer loop divides."""
    text = body_of(gated(5, 694, 77, parts=2, loop=2))
    assert text.count("in range(0, 347, 64):") == 2
    assert "(r64 < 347 - k" in text
    (kernel,) = lower_triton(low_rank(16, 256, 16, 512, parts=16), H200).kernels
    assert "in range(0, 256, 64):" in kernel.source
    assert kernel.stages > 1


def test_a_row_is_multiplied_elementwise() -> None:
    """One row has no use for matrix units."""
    g = KernelGraph("row")
    g.output(g.matmul(g.input((1, 64), "f16"), g.input((64, 32), "f16")))
    text = body_of(g.freeze())
    assert "ob_dot" not in text
    assert "tl.sum(" in text


def test_views_of_loads_move_nothing() -> None:
    g = KernelGraph("views")
    x = g.input((6, 8))
    g.output(g.exp(g.slice(g.transpose(x), 0, 2, 7)))
    text = body_of(g.freeze())
    for name in ("gather", "permute", "reshape"):
        assert name not in text
    assert "x0 + r8[:, None] + r8[None, :] * 8" in text


def test_values_before_the_loop_are_computed_once() -> None:
    """The norm of the queries stands in front of the loop, that of the values inside."""
    text = lower_triton(FUSED["attention norm"], H200).kernels[0].source
    before, inside = text.split("for it in range(")
    assert before.count("tl.sqrt(") == 1
    assert inside.count("tl.sqrt(") == 1
    assert before.count("tl.load(") == 1


def test_partial_results_get_a_second_kernel() -> None:
    x, w = input_node(0, (4, 96)), input_node(1, (96, 8))
    b = BlockBuilder((3,), 2)
    value = build.accum_sum(build.matmul(b.load(x, (1,), 1), b.load(w, (0,), 0)))
    b.store(value, (None,), reduce=Reduce.SUM)
    module = lower_triton(make_graph((x, w), b.launch()), H200)
    assert [x.origin.split()[0] for x in module.launches] == ["block", "combine"]
    assert module.scratch_bytes == 512
    assert "atomic" not in "".join(k.source for k in module.kernels)


def test_constants_and_counts_are_written() -> None:
    g = KernelGraph("counts")
    g.output(g.iota((3, 4), 0), g.iota((3, 4), 1), g.broadcast(g.const(2.5), (5, 7)))
    text = text_of(g.freeze())
    assert "(i // 4 % 3).to(tl.int32)" in text
    assert "(i % 4).to(tl.int32)" in text


def test_unaligned_tensors_are_not_assumed_to_be_aligned() -> None:
    g = KernelGraph("halves")
    x = g.input((3, 5), "f16")
    g.output(g.exp(g.slice(x, 0, 1, 3)), g.exp(g.slice(x, 0, 0, 2)))
    module = lower_triton(g.freeze(), H200)
    assert sorted(k.aligned for k in module.kernels) == [(False, True), (True, True)]


def test_offsets_beyond_32_bits_are_wide() -> None:
    g = KernelGraph("far")
    x = g.input((3, 40_000), "i8", strides=(1 << 30, 1))
    g.output(g.neg(x))
    text = body_of(g.freeze())
    assert "tl.program_id(0).to(tl.int64)" in text
    assert ".to(tl.int64)" not in body_of(FUSED["gated odd"])


def test_tiles_above_the_limit_are_refused_by_name() -> None:
    x = input_node(0, (2048, 1024))
    b = BlockBuilder((1,))
    b.store(build.exp(b.load(x, (None,))), (None,))
    with pytest.raises(Infeasible, match=r"tile of 2097152 elements .* limit is 1048576"):
        lower_triton(make_graph((x,), b.launch()), H200)
    x, w = (input_node(i, (64, 64), DType.F64) for i in (0, 1))
    b = BlockBuilder((1,))
    b.store(build.matmul(b.load(x, (None,)), b.load(w, (None,))), (None,))
    with pytest.raises(Infeasible, match="product of f64 tiles with 262144 terms"):
        lower_triton(make_graph((x, w), b.launch()), H200)


def test_what_no_target_addresses_is_refused() -> None:
    g = KernelGraph("packed")
    g.output(g.cast(g.input((4, 4), "i4"), "f32"))
    with pytest.raises(Infeasible, match="i4 tensors"):
        lower_triton(g.freeze(), H200)
    with pytest.raises(Infeasible, match="Triton target cannot serve"):
        lower_triton(FUSED["gated"], host())


def test_stages_fit_shared_memory() -> None:
    """Four iterations in flight where there is room; fewer on a smaller device."""
    graph = gated(64, 2048, 128, parts=1, loop=8)

    def stages(module: TritonModule) -> int:
        return module.kernels[0].stages

    assert stages(lower_triton(graph, H200)) == 3
    assert stages(lower_triton(graph, RTX3090)) == 1
    assert stages(lower_triton(graph, H200, TritonOptions(stages=2))) == 2
    assert lower_triton(graph, H200, TritonOptions(warps=2)).kernels[0].warps == 2


def test_variants_differ_and_start_with_the_default() -> None:
    for graph in (FUSED["gated"], FUSED["attention split"], load_program("ntrans", 1, "f16")):
        options = variants(graph, H200)
        assert options[0] == TritonOptions()
        assert len(options) == len(set(options)) >= 2
        assert len({lower_triton(graph, H200, o) for o in options}) > 1


@pytest.mark.parametrize("machine", ["a100", "rtx3090", "h200", "b200"])
@pytest.mark.parametrize("name", ["gqa", "rmsnorm", "gated_mlp", "moe", "attention"])
def test_the_programs_own_kernels_exist_everywhere(name: str, machine: str) -> None:
    module = lower_triton(load_program(name, 1, "f16"), find(machine))
    assert module.launches
    for kernel in module.kernels:
        ast.parse(kernel.source)
        assert len(kernel.pointers) == len(kernel.aligned)


# --- parts ----------------------------------------------------------------------------------------


def test_padding_is_shared_by_dims_that_meet() -> None:
    """The keys are rows of one product and the depth of the other: one axis of at least 16."""
    graph = attention(1, 5, 9, 7, row_tile=5, split=1, key_tile=9)
    block = flatten(graph.outputs[0].attrs.block)
    padding = Padding(block)
    sizes = {(n.op.value, d): padding.of(n, d) for n in block.body for d in range(n.rank)}
    assert sizes["exp", 1] == sizes["exp", 2] == 16
    assert sizes["load", 0] == 1
    assert set(sizes.values()) == {1, 16}
    plain = block_graph((1,), 1, 128, (_store(build.exp(_load((5, 7)))),))
    assert Padding(plain).of(plain.stores[0].value, 0) == 8


def _load(shape: tuple[int, ...]) -> build.Node:
    return BlockBuilder((1,)).load(input_node(0, shape), (None,))


def _store(value: build.Node) -> object:
    b = BlockBuilder((1,))
    b.store(value, (None,))
    return b.stores[0]


@pytest.mark.parametrize(
    ("old", "new", "want"),
    [
        ((4, 6), (24,), []),
        ((1, 4, 6), (4, 1, 6), [(1, 0), (2, 2)]),
        ((2, 4, 6), (2, 24), [(0, 0)]),
        ((4, 6, 5), (24, 5), [(2, 1)]),
        ((3, 4, 6, 5), (3, 2, 12, 5), [(0, 0), (3, 3)]),
    ],
)
def test_dims_that_a_reshape_keeps(
    old: tuple[int, ...], new: tuple[int, ...], want: list[tuple[int, int]]
) -> None:
    assert kept_dims(old, new) == want


def test_tiles_are_cut_to_powers_of_two() -> None:
    assert cut_dims((100, 100), 4096) == {0: 4}  # 32 rows of 128
    assert cut_dims((3, 5), 4096) == {}
    assert cut_dims((1000, 1000, 1000), 4096) == {0: 1000, 1: 250}
    assert cut_dims((8, 9000), 4096, frozen=[1]) == {0: 8}
    assert [power(n) for n in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]


def test_default_blocks_split_what_has_few_results() -> None:
    a, w = input_node(0, (8, 4096), DType.F16), input_node(1, (4096, 4096), DType.F16)
    block = default_block(build.matmul(a, w), H200.cores).block
    assert block.grid == (64, 2)
    assert block.stores[0].reduce is Reduce.SUM
    assert block.loop == 32
    large = build.matmul(
        input_node(0, (4096, 512), DType.F16), input_node(1, (512, 4096), DType.F16)
    )
    assert default_block(large, H200.cores).block.grid == (32, 32)
    block = default_block(build.sum(input_node(0, (2, 1 << 20)), 1), H200.cores).block
    assert block.blocks == 128
    assert block.stores[0].reduce is Reduce.SUM
    block = default_block(build.sum(input_node(0, (4096, 4096)), 0), H200.cores).block
    assert block.grid == (64, 2)  # 64 columns beside each other, the rows in two parts
    assert block.loads[0].shape == (256, 64)


def test_numbers_and_calls_as_text() -> None:
    assert literal(float("-inf"), "f") == 'float("-inf")'
    assert literal(2.0, "i") == "2"
    assert literal(0.1, "d") == "0.1"
    assert call_text("f", ["a", "b"]) == "f(a, b)"
    assert call_text("f", ["a" * 50, "b" * 50]).count("\n") == 3


def test_a_part_line_is_what_the_interpreter_cuts() -> None:
    block = flatten(
        attention(2, 33, 77, 8, row_tile=9, split=1, key_tile=16).outputs[0].attrs.block
    )
    splits = {s for n in block.body for s in block.info.splits[n] if s is not None}
    rows = next(s for s in splits if s.full == 33)
    keys = next(s for s in splits if s.full == 77 and s.loop)
    assert part_line(rows, block.grid, block.loop, "it") == "n33_1 = ob_part(33, g1 * 9, 9, 0, 9)"
    assert part_line(keys, block.grid, block.loop, "it") == (
        "n77_2_l = ob_part(77, 0, 77, it * 16, 16)"
    )


def test_largest_tile_and_streamed_bytes_are_known() -> None:
    graph = gated(16, 128, 64, parts=1, loop=2)
    block = flatten(graph.outputs[0].attrs.block)
    params = [Operand(x.dtype, row_major(x.shape)) for x in graph.inputs]
    work = Products(block, params, [Operand(DType.F16, (64, 1))])
    work.body()
    assert work.largest == 64 * 64
    assert work.streamed == 2 * 2 * (16 * 64 + 64 * 64)
