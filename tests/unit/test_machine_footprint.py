"""Footprints of hand-made blocks, counted by hand to the byte, and the limits that refuse them."""

from __future__ import annotations

import pytest

from obelisk.ir import BlockBuilder, BlockGraph, DType
from obelisk.ir import build as b
from obelisk.ir import composite as c
from obelisk.ir.op import SizeScope
from obelisk.ir.thread import thread_graph
from obelisk.machine import capacity, find, footprint
from obelisk.machine.footprint import arena, residence


def test_an_elementwise_chain_works_in_place() -> None:
    """Load (8, 16) f32, exp, add: one tile, since each result overwrites its operand."""
    bb = BlockBuilder((1,))
    x = bb.load(b.input_node(0, (8, 16)), (None,))
    bb.store(b.exp(x) + 1.0, (0,))
    assert footprint(bb.finish()) == 8 * 16 * 4


def test_a_second_reader_keeps_the_operand() -> None:
    """x is read again after exp(x): two tiles at once."""
    bb = BlockBuilder((1,))
    x = bb.load(b.input_node(0, (8, 16)), (None,))
    bb.store(b.exp(x) * x, (0,))
    assert footprint(bb.finish()) == 2 * 8 * 16 * 4


def test_narrow_loads_count_their_own_dtype_and_results_f32() -> None:
    """f16 tile of 256 bytes; exp of it takes 512 bytes beside it."""
    bb = BlockBuilder((1,))
    x = bb.load(b.input_node(0, (8, 16), DType.F16), (None,))
    bb.store(b.exp(x), (0,))
    assert footprint(bb.finish()) == 8 * 16 * 2 + 8 * 16 * 4


def test_bool_tiles_take_a_byte() -> None:
    """x, y; x < y takes 1 byte an element; where() overwrites x."""
    bb = BlockBuilder((1,))
    x = bb.load(b.input_node(0, (8, 16)), (None,))
    y = bb.load(b.input_node(1, (8, 16)), (None,))
    bb.store(b.where(b.less(x, y), x, y), (0,))
    assert footprint(bb.finish()) == 2 * 8 * 16 * 4 + 8 * 16


def test_a_view_shares_its_operand() -> None:
    """A transposed and reshaped load takes nothing; the product has its own tile."""
    bb = BlockBuilder((1,))
    x = bb.load(b.input_node(0, (8, 16)), (None,))
    y = bb.load(b.input_node(1, (32, 16)), (None,))
    bb.store(b.reshape(x @ b.transpose(y), (4, 64)), (0,))
    assert footprint(bb.finish()) == 4 * (8 * 16 + 32 * 16 + 8 * 32)


def test_a_permuted_operand_is_not_overwritten() -> None:
    """exp of a transposed tile has its own tile, and so has x + transpose(x)."""

    def block(both: bool) -> BlockGraph:
        bb = BlockBuilder((1,))
        x = bb.load(b.input_node(0, (16, 16)), (None,))
        bb.store(x + b.transpose(x) if both else b.exp(b.transpose(x)), (0,))
        return bb.finish()

    assert footprint(block(False)) == footprint(block(True)) == 2 * 4 * 16 * 16


def test_product_into_one_accumulator_needs_no_tile() -> None:
    """Tiles x (8, 4), w (4, 32) and the accumulator (8, 32); the product is added in place."""
    bb = BlockBuilder((1,), 4)
    x = bb.load(b.input_node(0, (8, 16)), (None,), 1)
    w = bb.load(b.input_node(1, (16, 32)), (None,), 0)
    bb.store(b.accum_sum(x @ w), (0,))
    block = bb.finish()
    assert footprint(block) == 4 * (8 * 4 + 4 * 32 + 8 * 32)
    assert residence(block).accumulators == 4 * 8 * 32
    assert residence(block).tiles == 4 * (8 * 4 + 4 * 32)


def test_product_read_twice_keeps_its_tile() -> None:
    """The product feeds two accumulators: product (8, 32), two accumulators, w dead but counted."""
    bb = BlockBuilder((1,), 4)
    x = bb.load(b.input_node(0, (8, 16)), (None,), 1)
    w = bb.load(b.input_node(1, (16, 32)), (None,), 0)
    p = x @ w
    bb.store(b.accum_sum(p), (0,))
    bb.store(b.accum_max(p), (0,))
    assert footprint(bb.finish()) == 4 * (8 * 4 + 4 * 32 + 3 * 8 * 32)


def test_fused_norm_and_product() -> None:
    """The published one-kernel rmsnorm: x and w tiles, two accumulators; square(x) overwrites x.

    tiles: x 16 x 128 f16, w 128 x 64 f16; accumulators 16 x 64 and 16 x 1 f32. square(x) is f32,
    wider than x, so it needs 16 x 128 x 4 beside x; w is dead by then only if the product came
    first, which the order of the stores makes so.
    """
    bb = BlockBuilder((64,), 32)
    x = bb.load(b.input_node(0, (16, 4096), DType.F16), (None,), 1)
    w = bb.load(b.input_node(1, (4096, 4096), DType.F16), (1,), 0)
    power = b.accum_sum(b.sum(b.square(x), 1)) / b.size(x, 1, SizeScope.FULL)
    bb.store(b.accum_sum(x @ w) / b.sqrt(power), (1,))
    tiles_x, tiles_w, accumulators = 16 * 128 * 2, 128 * 64 * 2, 16 * 64 * 4 + 16 * 4
    squared = 16 * 128 * 4
    assert footprint(bb.finish()) == accumulators + tiles_x + max(tiles_w, squared)


def test_online_softmax_keeps_two_maxima() -> None:
    """Loop of attention by hand: q stays, k, v, scores, running maximum twice, two accumulators."""
    bb = BlockBuilder((1,), 8)
    q = bb.load(b.input_node(0, (16, 32)), (None,))
    k = bb.load(b.input_node(1, (32, 64)), (None,), 1)
    v = bb.load(b.input_node(2, (64, 32)), (None,), 0)
    s = q @ k
    m = b.running_max(b.reduce_max(s, 1))
    p = b.exp(s - m)
    bb.store(b.accum_rescale(p @ v, m) / b.accum_rescale(b.sum(p, 1), m), (0,))
    kept = 16 * 32  # q
    maxima = 2 * 16
    accumulators = 16 * 32 + 16
    scores = 16 * 8  # exp and subtraction work in place
    # The largest moment: scores, v and the product p @ v; k is dead by then.
    moment = scores + 8 * 32 + 16 * 32
    assert footprint(bb.finish()) == 4 * (kept + maxima + accumulators + moment)


def test_values_only_the_end_reads_are_made_there() -> None:
    """A residual that is added after the loop does not take room during it."""
    bb = BlockBuilder((1,), 16)
    x = bb.load(b.input_node(0, (4, 1024)), (None,), 1)
    r = bb.load(b.input_node(1, (4, 8)), (None,))
    bb.store(b.accum_sum(b.sum(x, 1)) + r, (0,))
    loop = 4 * 64 + 4 + 4  # tile of x, its sum, the accumulator
    end = 4 + 4 * 8  # the accumulator and r; the result overwrites r
    assert footprint(bb.finish()) == 4 * max(loop, end)


def test_size_reads_no_elements() -> None:
    """mean = sum / size: asking for the extent after the loop does not keep the tile alive."""
    bb = BlockBuilder((1,), 4)
    x = bb.load(b.input_node(0, (4, 64)), (None,), 1)
    total = b.accum_sum(b.sum(x, 1))
    bb.store(total / b.size(x, 1, SizeScope.FULL), (0,))
    assert footprint(bb.finish()) == 4 * (4 * 16 + 4 + 4)


def test_thread_graphs_with_a_fold_are_not_in_place() -> None:
    """An elementwise thread graph overwrites its operand, one with a reduction does not."""
    x = b.input_node(0, (8, 16))

    def block(folds: bool) -> BlockGraph:
        bb = BlockBuilder((1,))
        tile = bb.load(x, (None,))
        e = b.exp(b.elem(0, tile))
        body = e / b.sum(e, 1) if folds else e
        bb.store(b.run_thread(thread_graph((body,)), [tile])[0], (0,))
        return bb.finish()

    assert footprint(block(False)) == 4 * 8 * 16
    assert footprint(block(True)) == 2 * 4 * 8 * 16


def test_ragged_tiles_count_full() -> None:
    """77 columns cut into 3 parts and 4 iterations: tiles of ceil(26 / 4) = 7 columns."""
    bb = BlockBuilder((3,), 4)
    x = bb.load(b.input_node(0, (5, 77)), (1,), 1)
    bb.store(b.exp(x), (1,), 1)
    assert footprint(bb.finish()) == 4 * 5 * 7


def _product(m: int, n: int, k: int, threads: int = 128) -> BlockGraph:
    bb = BlockBuilder((1,), 8, threads)
    x = bb.load(b.input_node(0, (m, 8 * k), DType.F16), (None,), 1)
    w = bb.load(b.input_node(1, (8 * k, n), DType.F16), (None,), 0)
    bb.store(b.accum_sum(x @ w), (0,))
    return bb.finish()


def test_capacity_names_shared_memory_by_architecture() -> None:
    """192 KB of tiles: fits 227 KB, not 163 or 99; refusals name both sides."""
    block = _product(16, 16, 3072)  # (16 + 16) * 3072 * 2 = 196608 bytes, accumulators 1 KB
    for arch in ("sm_90a", "sm_100a"):
        assert capacity(block, find(arch)) is None
    for arch in ("sm_80", "sm_86", "sm_89", "sm_120"):
        reason = capacity(block, find(arch))
        assert reason is not None
        assert reason.startswith("shared memory")
        assert "196608" in reason
        assert str(find(arch).shared_bytes) in reason


def test_capacity_names_registers_for_accumulators() -> None:
    """256 x 256 f32 accumulators: 512 registers a thread at 128 threads, 128 at 512 threads."""
    few, many = _product(256, 256, 64), _product(256, 256, 64, threads=512)
    reason = capacity(few, find("h200"))
    assert reason is not None
    assert reason.startswith("registers")
    assert "512 a thread of 192" in reason
    assert capacity(many, find("h200")) is None


def test_capacity_names_threads() -> None:
    """More threads than a block may have, or no whole warps."""
    assert "2048" in (capacity(_product(16, 16, 64, threads=2048), find("h200")) or "")
    assert "warp" in (capacity(_product(16, 16, 64, threads=100), find("h200")) or "")


def test_capacity_of_a_cpu_is_its_share_of_the_last_cache() -> None:
    """16 MB of L3 for two cores: a tile of 8 MB fits, one of 9 MB does not."""
    machine = find("x86-64-v3")
    assert machine.shared_bytes == 8 << 20

    def block(rows: int) -> BlockGraph:
        bb = BlockBuilder((1,))
        bb.store(c.relu(bb.load(b.input_node(0, (rows, 1024)), (None,))), (0,))
        return bb.finish()

    assert capacity(block(2048), machine) is None
    reason = capacity(block(2304), machine)
    assert reason is not None
    assert reason.startswith("cache")


def test_a_cpu_reads_loads_where_they_lie() -> None:
    """Only the accumulator counts for f32 operands; f16 ones are widened into tiles."""

    def block(dtype: DType) -> BlockGraph:
        bb = BlockBuilder((1,), 2)
        x = bb.load(b.input_node(0, (8, 4096), dtype), (None,), 1)
        w = bb.load(b.input_node(1, (4096, 4096), dtype), (None,), 0)
        bb.store(b.accum_sum(x @ w), (0,))
        return bb.finish()

    result = 4 * 8 * 4096
    assert arena(block(DType.F32)) == result
    assert arena(block(DType.F16)) == result + 4 * 2048 * (8 + 4096)
    assert capacity(block(DType.F32), find("x86-64-v3")) is None
    assert "cache" in (capacity(block(DType.F16), find("x86-64-v3")) or "")


@pytest.mark.parametrize("loop", [1, 2, 4, 8, 16])
def test_more_iterations_never_need_more(loop: int) -> None:
    """Doubling the loop of a product halves its tiles and keeps the accumulator."""

    def block(times: int) -> BlockGraph:
        bb = BlockBuilder((1,), times)
        x = bb.load(b.input_node(0, (8, 256)), (None,), 1)
        w = bb.load(b.input_node(1, (256, 32)), (None,), 0)
        bb.store(b.accum_sum(x @ w), (0,))
        return bb.finish()

    tiles = 4 * 256 * (8 + 32)
    assert footprint(block(loop)) == tiles // loop + 4 * 8 * 32
    assert footprint(block(2 * loop)) < footprint(block(loop))
