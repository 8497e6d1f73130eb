"""The CUDA megakernel compiles for every architecture within what was planned, without a GPU.

Needs NVRTC or nvcc; skipped loudly where there is neither.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from tests.mega_cuda_models import MODELS

from obelisk.base.errors import Infeasible, MissingDependency
from obelisk.build.cuda import Resources, compile_cuda, toolchain
from obelisk.machine import find
from obelisk.mega.cuda import EmittedCuda, emit_cuda
from obelisk.schedule.gpu import DIRECT
from obelisk.schedule.gpu_default import (
    default_tiling,
    with_ahead,
    with_direct,
)
from obelisk.tasks import WeightFormat, Workload, parse_config

try:
    toolchain()
except MissingDependency as missing:
    pytest.skip(f"no CUDA compiler here: {missing}", allow_module_level=True)

MACHINES = ("a100", "rtx3090", "rtx4090", "h200", "b200", "rtx5090")
MODEL = parse_config(MODELS["qwen3, 24"])
WORK = Workload(1, 64, WeightFormat.BF16)
POPC = 0x309  # in the low bits of an instruction of sm_90


def emitted(name: str, work: Workload = WORK) -> EmittedCuda:
    """The kernel of the smallest model for a machine; with direct products where that goes."""
    machine = find(name)
    tiling = default_tiling(MODEL, work, machine)
    return emit_cuda(MODEL, work, with_direct(MODEL, work, tiling, machine) or tiling, machine)


@pytest.mark.parametrize(
    "work",
    [WORK, Workload(1, 64, WeightFormat.INT8), Workload(2, 64, WeightFormat.W4A16, 64, True),
     Workload(8, 64, WeightFormat.FP32), Workload(1, 64, WeightFormat.W4A16, 128),
     Workload(1, 64, WeightFormat.W4A16, 32, True),
     Workload(1, 64, WeightFormat.W4A16, 128, head=WeightFormat.INT8),
     Workload(3, 64, WeightFormat.W4A16, 64, True, WeightFormat.INT8)],
    ids=lambda w: f"{w.said} {w.group}, batch {w.batch}",
)  # fmt: skip
def test_every_architecture_within_its_limits(work: Workload) -> None:
    """sm_80, 86, 89, 90a, 100a and 120: registers without spills, shared memory as planned."""

    def one(name: str) -> tuple[str, Resources]:
        return name, compile_cuda(emitted(name, work).source, find(name).arch).resources

    with ThreadPoolExecutor(2) as pool:
        built = dict(pool.map(one, MACHINES))
    for name in MACHINES:
        machine, plan, r = find(name), emitted(name, work), built[name]
        assert r.spill_stores == r.spill_loads == 0, f"{name}: {r}"
        assert r.shared <= plan.shared.misc
        assert plan.shared.dynamic + r.shared <= machine.shared_bytes
        warps = plan.tiling.threads // 32  # four register files: the fullest decides
        assert -(-warps // 4) * 32 * r.registers <= machine.registers // 4


def test_registers_hold_what_is_read_ahead() -> None:
    """Qwen2.5-1.5B's shape without a copy engine, with gate and up read ahead and without it:
    a few words spilled at most, and a text that is not much longer.
    """
    machine, sizes = find("rtx4090"), []
    model = replace(
        parse_config(MODELS["qwen2, groups of 7, tied"]), hidden=1536, layers=28, heads=12,
        kv_heads=2, head_dim=128, ffn=8960, vocab=151936,
    )  # fmt: skip
    first = default_tiling(model, WORK, machine)
    for tiling in (first, with_ahead(model, WORK, first, machine)):
        assert tiling is not None
        built = compile_cuda(emit_cuda(model, WORK, tiling, machine).source, machine.arch)
        assert built.resources.spill_stores <= 48, tiling
        sizes.append(built.path.stat().st_size)
    assert (first.ahead, tiling.ahead) == (1, 0)
    assert sizes[0] < 1.03 * sizes[1]


@pytest.mark.parametrize("weights", [w for w in WeightFormat if w is not WeightFormat.FP16])
def test_a_slot_is_given_back_behind_the_products_that_read_it(weights: WeightFormat) -> None:
    """The compiler keeps the comparison of sums that each of the five products' arrivals waits for:
    without it nothing but the order of instructions is between a read and the next copy.
    """
    work, machine = replace(WORK, weights=weights), find("h200")
    tiling = replace(default_tiling(MODEL, work, machine), direct=False)
    source = emit_cuda(MODEL, work, tiling, machine).source
    image = compile_cuda(source, machine.arch).path.read_bytes()
    assert image.count((0x7F800001).to_bytes(4, "little")) >= 5


@pytest.mark.parametrize(
    ("name", "weights"), [*(("h200", w) for w in DIRECT), ("rtx4090", WeightFormat.BF16)]
)
def test_a_direct_product_gives_a_slot_back_behind_the_reads_of_it(
    name: str, weights: WeightFormat
) -> None:
    """The compiler keeps the count of ones that each arrival, or each copy to a slot that was read,
    waits for: of the two texts of q, k, v (the first layer reads the embedding), the output
    projection, gate and up, down.
    """
    emit = emitted(name, replace(WORK, weights=weights))
    assert emit.tiling.direct
    assert emit.tiling.private == (name == "rtx4090")
    image = compile_cuda(emit.source, find("h200").arch).path.read_bytes()
    words = [int.from_bytes(image[i : i + 2], "little") for i in range(0, len(image) - 15, 8)]
    assert sum(w & 0xFFF == POPC for w in words) >= 5


def test_a_head_of_its_own_is_in_no_other_plans_text() -> None:
    """The kernels of plans without one are the text that was measured: no word of it is in them."""
    for form in WeightFormat:
        source = emitted("h200", replace(WORK, weights=form)).source
        assert "OWN_HEAD" not in source
        assert "EMBED_BITS" not in source
    source = emitted(
        "h200", replace(WORK, weights=WeightFormat.W4A16, head=WeightFormat.INT8)
    ).source
    assert "#define OM_OUTER_BITS 8\n" in source
    assert "#define OM_EMBED_BITS 16\n" in source


def test_equal_arguments_give_equal_text_and_architectures_differ() -> None:
    """Byte for byte; the copy engine only where there is one."""
    assert emitted("h200").source == emitted("h200").source
    assert "#define OM_BULK 1" in emitted("h200").source
    assert "#define OM_BULK 0" in emitted("rtx4090").source
    assert "#define OM_TRY_WAIT 0" in emitted("a100").source


def test_limits_are_named() -> None:
    """What the kernel cannot do is refused before a compiler is asked."""
    machine = find("h200")
    wide = parse_config({**MODELS["llama, groups of 4"], "head_dim": 256})
    with pytest.raises(Infeasible, match="head_dim 256: it needs a multiple of 8, at most 128"):
        emit_cuda(wide, WORK, default_tiling(wide, WORK, machine), machine)
    t = default_tiling(MODEL, WORK, machine)
    for change, words in (
        ({"stages": 200}, "bytes of shared memory"), ({"stages": 4}, "stages for 8 warps"),
        ({"blocks": 400}, "400 blocks"), ({"kv_pieces": 40}, "1 to 16"),
        ({"down_split": 7}, "cannot be split in 7"), ({"barriers": ("x",)}, "the edges are"),
        ({"in_flight": 100}, "100 chunks in flight"), ({"chunk_cols": 40}, "multiple of 32"),
    ):  # fmt: skip
        with pytest.raises(Infeasible, match=words):
            emit_cuda(MODEL, WORK, replace(t, **change), machine)
    with pytest.raises(Infeasible, match="no copy engine"):
        emit_cuda(MODEL, WORK, replace(default_tiling(MODEL, WORK, find("a100")), bulk=True),
                  find("a100"))  # fmt: skip
