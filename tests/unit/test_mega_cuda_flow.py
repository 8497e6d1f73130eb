"""The judge of the CUDA kernel's exchange accepts real shapes and finds what is left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from tests.mega_cuda_models import MODELS
from tests.mega_models import config

from obelisk.base.errors import Infeasible
from obelisk.machine import find
from obelisk.mega.cuda import emit_cuda, flow
from obelisk.mega.cuda.emit import cuts, shares
from obelisk.mega.cuda.flow import check_flow
from obelisk.schedule.gpu import (
    DRAWN,
    direct_units,
    imbalance,
    legal_splits,
    piece_width,
    refuse,
    shared_plan,
    up_tiles,
)
from obelisk.schedule.gpu_default import (
    default_tiling,
    other_default,
    with_staged,
)
from obelisk.tasks import ModelConfig, WeightFormat, Workload, parse_config

H200 = find("h200")
WORK = Workload(1, 256, WeightFormat.BF16)


def real(layers: int, h: int, q: int, kv: int, d: int, f: int) -> ModelConfig:
    """A public model's layer sizes."""
    return parse_config(
        config(
            "qwen3", hidden_size=h, num_hidden_layers=layers, num_attention_heads=q,
            num_key_value_heads=kv, head_dim=d, intermediate_size=f, vocab_size=151936,
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "batch"),
    [((16, 2048, 32, 8, 64, 8192), 1), ((27, 1024, 16, 8, 128, 3072), 8),
     ((28, 1536, 12, 2, 128, 8960), 1)],
)  # fmt: skip
def test_defaults_of_real_sizes_are_safe(sizes: Sequence[int], batch: int) -> None:
    """Even and odd numbers of layers, with and without splits along K."""
    model, work = real(*sizes), Workload(batch, 640, WeightFormat.BF16)
    t = default_tiling(model, work, H200)
    assert check_flow(model, work, t, shares(model, t)) == []


@pytest.mark.parametrize("name", MODELS)
def test_small_models_are_safe(name: str) -> None:
    """Fewer tiles than blocks in most operators, one layer, several slots."""
    model, work = parse_config(MODELS[name]), Workload(3, 160, WeightFormat.BF16)
    t = default_tiling(model, work, H200)
    assert check_flow(model, work, t, shares(model, t)) == []


@pytest.mark.parametrize("splits", [(1, 1), (1, 2), (2, 4)])
def test_rounded_rows_are_safe(splits: tuple[int, int]) -> None:
    """Even and odd numbers of layers; parts are added by one block before all read their sum."""
    for model in (real(16, 2048, 32, 8, 64, 8192), real(27, 1024, 16, 8, 128, 3072)):
        work = Workload(8, 640, WeightFormat.BF16)
        t = default_tiling(model, work, H200)
        t = replace(t, rounded=True, o_split=splits[0], down_split=splits[1])
        assert check_flow(model, work, t, shares(model, t)) == []


class _Hasty(flow._Judge):
    """Rows that are written before the other parts were waited for, in the one buffer of o."""

    def sums(self, kind: str, value: str, turns: Sequence[int], gen: int) -> None:
        for block, turn in enumerate(turns):
            for part, tiles in self.split(kind, turn):
                self.inputs(kind, block, part, gen)
                self.rows(value, block, part, tiles, gen)
                if part == 0:
                    self.wait(value, block, self.cells(1, tiles), gen)


def test_parts_must_be_written_before_they_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that adds a part which nobody has written yet."""
    monkeypatch.setattr(flow, "_Judge", _Hasty)
    model = real(16, 2048, 32, 8, 64, 8192)
    t = replace(default_tiling(model, WORK, H200), rounded=True, o_split=2)
    assert any("waits for ever" in f for f in check_flow(model, WORK, t, shares(model, t)))


def test_a_block_without_gates_could_be_overtaken() -> None:
    """Why there are no more blocks than tiles of gate and up: the judge finds the race."""
    model = parse_config(MODELS["qwen3, 24"])
    t = replace(default_tiling(model, WORK, H200), blocks=up_tiles(model) + 20)
    assert any("overwrites o " in f for f in check_flow(model, WORK, t, shares(model, t)))
    assert "tiles of gate and up" in (refuse(model, WORK, t, H200) or "")
    with pytest.raises(Infeasible, match="tiles of gate and up"):
        emit_cuda(model, WORK, t, H200)


def test_shares_must_be_the_units() -> None:
    """A gap, an overlap, a wrong end, a missing block."""
    model = parse_config(MODELS["llama, groups of 4"])
    t = default_tiling(model, WORK, H200)
    good = shares(model, t)
    bad: dict[str, Any] = {
        "gap": [1, *good["up"][1:]], "end": [*good["up"][:-1], good["up"][-1] + 1],
        "overlap": [good["up"][0], good["up"][3], good["up"][2], *good["up"][3:]],
        "block": good["up"][:-1],
    }  # fmt: skip
    for cut in bad.values():
        assert any("shares of up" in f for f in check_flow(model, WORK, t, {**good, "up": cut}))


class _Single(flow._Judge):
    """One buffer for what the down projection writes, instead of two."""

    def write(self, value: str, block: int, cells: Any, generation: int) -> None:
        super().write(value.replace("down1", "down0"), block, cells, generation)

    def wait(self, value: str, block: int, cells: Any, generation: int) -> None:
        super().wait(value.replace("down1", "down0"), block, cells, generation)


class _NoMeeting(flow._Judge):
    """Steps of a prompt that nothing separates."""

    def meet(self) -> None:
        return


class _Late(flow._Judge):
    """Attention that reads the generation before."""

    def attend(self, layer: int, turns: Sequence[int], gen: int) -> None:
        super().attend(layer, turns, gen - 1)


class _Wandering(flow._Judge):
    """Pieces that change their block from step to step."""

    def attend(self, layer: int, turns: Sequence[int], gen: int) -> None:
        moved = [(t + gen // (layer + 3)) % self.t.blocks for t in turns]
        super().attend(layer, moved, gen)


@pytest.mark.parametrize(
    ("judge", "words"),
    [(_Single, "may still be read"), (_NoMeeting, "may still be read"),
     (_Late, "waits for ever"), (_Wandering, "changes its block")],
)  # fmt: skip
def test_what_is_left_out_is_found(
    judge: type, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same programs with one wait less, one word wrong, or an item elsewhere."""
    monkeypatch.setattr(flow, "_Judge", judge)
    model = real(2, 1536, 12, 2, 128, 8960)
    t = replace(default_tiling(model, WORK, H200), o_split=1)  # blocks without tiles of o
    assert any(words in f for f in check_flow(model, WORK, t, shares(model, t)))


def test_cuts_and_splits() -> None:
    """Shares are contiguous, differ by one at most, and splits are equal parts of whole 32s."""
    cut = cuts(1000, 132)
    sizes = {b - a for a, b in pairwise(cut)}
    assert cut[0] == 0
    assert cut[-1] == 1000
    assert sizes == {7, 8}
    assert legal_splits(8960, 8) == (1, 2, 4, 5, 7, 8)
    assert imbalance(96, 1, 132) == 1.375
    assert imbalance(96, 4, 132) < 1.04


def test_defaults_fit_every_gpu() -> None:
    """Shared memory, ring and queue of a public model on all known devices, one slot and eight."""
    model = real(28, 2048, 16, 8, 128, 6144)
    for name in ("a100", "rtx3090", "rtx4090", "h200", "b200", "rtx5090"):
        machine = find(name)
        for batch in (1, 8):
            work = Workload(batch, 2048, WeightFormat.BF16)
            t = default_tiling(model, work, machine)
            assert shared_plan(model, work, t).total <= machine.shared_bytes
            assert t.private == (not t.bulk and batch == 1)
            assert t.stages >= (DRAWN if t.private else t.warps)
            assert 1 <= t.in_flight_waiting <= t.in_flight <= t.stages
            assert t.bulk == (name in ("h200", "b200"))
            ahead = with_staged(model, work, t, machine)
            assert ahead is None or (
                (ahead.staged > 0 or t.kv_ring) and refuse(model, work, ahead, machine) is None
            )
            assert ahead is not None or (name, batch) != ("h200", 1)


def test_small_layers_have_the_cache_copied_ahead() -> None:
    """Where a layer is a ring or two and there is a copy engine; the other way is tried too."""
    machine, work = find("h200"), Workload(1, 640, WeightFormat.BF16)
    small, large = real(28, 1024, 16, 8, 128, 3072), real(28, 2048, 16, 8, 128, 6144)
    ahead = default_tiling(small, work, machine)
    assert ahead.staged == 4
    other = with_staged(small, work, ahead, machine)
    assert other is not None
    assert (other.staged, other.stages > ahead.stages) == (0, True)
    assert default_tiling(large, work, machine).staged == 0
    assert default_tiling(small, work, find("rtx4090")).staged == 0
    assert default_tiling(small, replace(work, batch=2), machine).staged == 0


def test_long_pieces_go_through_the_ring_and_many_slots_share_rounded_rows() -> None:
    """Cached positions by default on a device with a copy engine, rounded rows with bf16 alone."""
    model = real(16, 2048, 32, 8, 64, 8192)
    found = {}
    for batch, context in ((1, 640), (1, 4224), (4, 640), (8, 640)):
        t = default_tiling(model, Workload(batch, context, WeightFormat.BF16), H200)
        found[batch, context] = (t.kv_ring, t.rounded, t.o_split, t.down_split, t.in_flight_waiting)
    assert found[1, 640] == (False, False, 2, 4, 6)  # one part of o would be as even
    assert found[1, 4224] == (True, False, 2, 4, 6)
    assert found[4, 640] == (False, False, 1, 1, 4)
    assert found[8, 640] == (True, True, 4, 4, 2)
    work = Workload(8, 640, WeightFormat.FP16)
    assert not default_tiling(model, work, H200).rounded
    assert not default_tiling(model, replace(work, batch=1, context=4224), find("rtx4090")).kv_ring
    ring = default_tiling(model, work, H200)
    other = with_staged(model, work, ring, H200)
    assert ring.kv_ring
    assert other is not None
    assert not other.kv_ring


@pytest.mark.parametrize("card", ["a100", "rtx3090", "rtx4090", "rtx5090"])
def test_without_a_copy_engine_warps_copy_their_own_weights(card: str) -> None:
    """One slot of bf16: direct products, the head as well, at least four stages, a slab of each
    warp; no warp that loads; o and down as whole as balance and a lane's looks allow. Else warps
    that load, several.
    """
    machine, work = find(card), Workload(1, 640, WeightFormat.BF16)
    shapes = {
        "llama-1b": real(16, 2048, 32, 8, 64, 8192), "qwen2.5": real(28, 1536, 12, 2, 128, 8960),
        "qwen3-8b": real(36, 4096, 32, 8, 128, 12288),
    }  # fmt: skip
    for name, model in shapes.items():
        t = default_tiling(model, work, machine)
        assert t.private, name
        assert t.direct, name
        assert (t.bulk, t.loader_warps, t.threads) == (False, 0, 256)
        assert t.chunk_cols == 32 * t.warps
        assert t.stages >= 4
        assert shared_plan(model, work, t).total <= machine.shared_bytes
        assert "head" in direct_units(model, 1, t)
        for batch, form in ((2, WeightFormat.BF16), (1, WeightFormat.FP16), (1, WeightFormat.INT8)):
            other = default_tiling(model, Workload(batch, 640, form), machine)
            assert (other.private, other.loader_warps) == (False, 4)


def test_what_stands_against_own_copies() -> None:
    """A copy engine, warps that load, keys and values copied ahead, other chunks, too short a
    ring; and nobody who copies.
    """
    machine, work = find("rtx4090"), Workload(1, 640, WeightFormat.BF16)
    model = real(16, 2048, 32, 8, 64, 8192)
    t = default_tiling(model, work, machine)
    assert refuse(model, work, t, machine) is None
    for change, words in (
        ({"loader_warps": 1}, "no loading warp"), ({"kv_ring": True}, "copied ahead"),
        ({"direct": False}, "direct products"), ({"chunk_cols": 128}, "a chunk of 128 columns"),
        ({"stages": 3, "in_flight": 3, "in_flight_waiting": 3}, "3 stages: a warp reads 4"),
        ({"private": False, "ahead": 0, "stages": 9, "in_flight": 9, "in_flight_waiting": 9},
         "no copy engine, and no warp that copies"),
        ({"ahead": -1}, "-1 units of gate and up"),
        ({"ahead": 3}, "3 units of gate and up ahead: a warp holds 2"),
        ({"ahead": 1, "hold": 4}, "units of the output projection of 4 slabs"),
        ({"hold": 18}, "32 slabs of a unit, of which a warp holds 18: no multiple of 4"),
    ):  # fmt: skip
        why = refuse(model, work, replace(t, **change), machine)
        assert why is not None
        assert words in why
    four = default_tiling(model, replace(work, weights=WeightFormat.W4A16), machine)
    own = replace(four, direct=True, private=True, loader_warps=0, staged=0)
    found = refuse(model, replace(work, weights=WeightFormat.W4A16), own, machine)
    assert found == "warps copy their own weights where these are bf16, not w4a16"
    loads = default_tiling(model, replace(work, batch=2), machine)
    for change, words in (
        ({"ahead": 1}, "ahead where warps copy their own"),
        ({"halved": True, "warps": 1}, "between two warps"),
    ):
        assert words in (
            refuse(model, replace(work, batch=2), replace(loads, **change), machine) or ""
        )


def test_what_is_tried_where_warps_copy_their_own_weights() -> None:
    """Gate and up read ahead as far as registers go, by default, and not; attention's sums halved
    where that makes room for stages, by default where it makes two.
    """
    machine, work = find("rtx4090"), Workload(1, 640, WeightFormat.BF16)
    found = {}
    for name, model in (
        ("llama-1b", real(16, 2048, 32, 8, 64, 8192)),
        ("qwen2.5", real(28, 1536, 12, 2, 128, 8960)),
        ("qwen3-8b", real(36, 4096, 32, 8, 128, 12288)),
    ):
        t = default_tiling(model, work, machine)
        tried = [t, *other_default(model, work, t, machine)]
        assert all(refuse(model, work, other, machine) is None for other in tried)
        found[name] = [(o.ahead, o.halved, o.stages) for o in tried if o.private]
    assert found == {
        "llama-1b": [(1, False, 10), (0, False, 10)],
        "qwen2.5": [(1, True, 9), (0, True, 9), (1, False, 7)],
        "qwen3-8b": [(0, False, 8), (0, True, 9)],
    }


def test_products_are_direct_where_a_warp_holds_its_part_of_a_unit() -> None:
    """One slot of bf16; the fewest parts along K that a warp can hold; all chunks in flight while a
    block waits where a layer is more than two rings; the other way is tried, too.
    """
    work = Workload(1, 640, WeightFormat.BF16)
    small, large = real(28, 1024, 16, 8, 128, 3072), real(36, 4096, 32, 8, 128, 12288)
    t = default_tiling(small, work, H200)
    assert (t.direct, t.o_split, t.down_split, t.in_flight_waiting) == (True, 2, 2, 2)
    assert not t.look_first
    wide = default_tiling(real(28, 1536, 12, 2, 128, 8960), work, H200)
    assert (wide.direct, wide.look_first, wide.in_flight_waiting) == (True, True, wide.in_flight)
    assert direct_units(small, 1, t) == {"qkv": 2, "o": 1, "up": 3, "down": 1}
    (other,) = other_default(small, work, t, H200)
    assert (other.direct, other.in_flight_waiting) == (False, 2)
    assert not default_tiling(large, work, H200).direct  # 16 slabs a warp
    for changed in (replace(work, batch=2), Workload(1, 640, WeightFormat.FP16)):
        plain = default_tiling(small, changed, H200)
        assert not plain.direct
        why = refuse(small, changed, replace(plain, direct=True), H200)
        assert why == "direct products are for batch 1 and bf16 or 4-bit weights"
    four = replace(work, weights=WeightFormat.W4A16)
    narrow = default_tiling(real(28, 2048, 16, 8, 128, 6144), four, H200)
    assert (narrow.direct, narrow.o_split, narrow.down_split, narrow.staged) == (True, 2, 1, 4)
    assert (narrow.look_first, narrow.in_flight_waiting) == (False, 2)
    assert default_tiling(large, four, H200).look_first
    padded = refuse(small, four, replace(narrow, chunk_cols=256), H200) or ""
    assert padded == "direct products: a slot of 2176 bytes has room behind its slabs"
    ring = replace(t, stages=8, down_split=1, in_flight=2, in_flight_waiting=2)
    assert "a unit has more than 8 chunks" in (refuse(small, work, ring, H200) or "")
    rounded = refuse(small, work, replace(t, rounded=True), H200) or ""
    assert "round" in rounded


def test_what_the_ring_and_rounded_rows_cannot_do_is_named() -> None:
    """Each limit in words."""
    model, work = real(16, 2048, 32, 8, 64, 8192), Workload(8, 640, WeightFormat.BF16)
    t = default_tiling(model, work, H200)
    wide = real(16, 2048, 36, 2, 64, 8192)
    for sizes, change, words in (
        (model, {"staged": 2}, "a place of their own"),
        (model, {"chunk_cols": 32}, "holds no 16 positions"),
        (wide, {}, "18 query heads a group"),
        (real(16, 2064, 32, 8, 64, 8192), {}, "a multiple of 64"),
    ):
        assert words in (
            refuse(sizes, work, replace(t, stages=12, in_flight=4, **change), H200) or ""
        )
    half = Workload(8, 640, WeightFormat.FP16)
    assert "could overflow" in (refuse(model, half, t, H200) or "")


def test_pieces_seldom_change_their_width() -> None:
    """They cover the context, waste a sixteenth at most, and seldom change while it doubles."""
    for pieces in (1, 3, 8, 16):
        widths = [piece_width(n, pieces) for n in range(1, 4097)]
        assert all(w * pieces >= n for n, w in enumerate(widths, 1))
        shares = [-(-n // pieces) for n in range(1, 4097)]
        pairs = zip(shares, widths, strict=True)
        assert all(w < max(x + 8, 1.0625 * x + 1) for x, w in pairs)
        assert len(set(widths[2047:])) <= 18
