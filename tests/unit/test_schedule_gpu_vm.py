"""The virtual machine of GPU schedules against plain numpy, and that it notices unsafe
schedules.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.mega_models import Reference, config, random_tensors

from obelisk.base.errors import InternalError
from obelisk.schedule.gpu import EDGES, GpuTiling, slabs_of
from obelisk.schedule.gpu_tasks import GpuStep
from obelisk.schedule.gpu_types import Copy, GpuSchedule, Poll
from obelisk.schedule.gpu_vm import GpuMachine
from obelisk.schedule.ir import Setting, schedule_of
from obelisk.tasks import WeightFormat, Workload, parse_config

TILINGS = (
    GpuTiling(3, chunk_cols=32, stages=5, in_flight=2, warps=2, kv_pieces=2, rotate=1, o_split=2),
    GpuTiling(5, chunk_cols=64, stages=4, in_flight=4, warps=4, kv_pieces=3, rotate=2,
              down_split=3, barriers=("o", "down")),
    GpuTiling(2, chunk_cols=32, stages=2, in_flight=1, warps=1, kv_pieces=1, rotate=0,
              barriers=EDGES),
    GpuTiling(3, chunk_cols=32, stages=3, in_flight=2, warps=2, kv_pieces=2, rotate=1,
              kv_ring=True),
)  # fmt: skip
FAMILIES = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {"hidden_size": 72, "tie_word_embeddings": True},
    "qwen3": {"vocab_size": 91},
}


def made(
    family: str, tiling: GpuTiling, batch: int = 2, form: WeightFormat = WeightFormat.BF16
) -> tuple[GpuSchedule, dict, dict]:
    """A schedule of a small model, its configuration and its tensors."""
    c = config(family, head_dim=16, **FAMILIES[family])
    work = Workload(batch, 16, form)
    _, slab, _, head = slabs_of(work)
    tiling = replace(tiling, slab_bytes=slab, head_bytes=head)
    step = GpuStep(parse_config(c), work, tiling)
    return schedule_of(Setting(step)), c, random_tensors(c, seed=3)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("number", range(len(TILINGS)))
def test_logits_and_tokens_equal_a_reference(family: str, number: int) -> None:
    """Four steps of two slots with different tokens, blocks and warps interleaved at random."""
    schedule, c, tensors = made(family, TILINGS[number])
    machine = GpuMachine(schedule, tensors.__getitem__, seed=number)
    references = [Reference(c, tensors) for _ in range(2)]
    for tokens in ((3, 7), (1, 1), (50, 2), (9, 88)):
        got = machine.step_once(tokens)
        want = np.stack([r.step(t) for r, t in zip(references, tokens, strict=True)])
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)
        assert (machine.tokens == want.argmax(1)).all()  # every block chose the same


def test_values_of_32_bits_have_words_of_their_own() -> None:
    """Pieces of attention and the MLP take twice the words of 16-bit ones; the same logits."""
    wide, c, tensors = made("qwen3", TILINGS[1], form=WeightFormat.FP32)
    narrow, *_ = made("qwen3", TILINGS[1])
    assert wide.step.widths["up"] == 2 * narrow.step.widths["up"]
    assert wide.step.widths["attend"] > narrow.step.widths["attend"]
    machine, other = (GpuMachine(s, tensors.__getitem__) for s in (wide, narrow))
    references = [Reference(c, tensors) for _ in range(2)]
    for tokens in ((3, 7), (1, 1), (50, 2)):
        got = machine.step_once(tokens)
        assert np.array_equal(got, other.step_once(tokens))
        want = np.stack([r.step(t) for r, t in zip(references, tokens, strict=True)])
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)


def test_the_order_of_blocks_changes_nothing() -> None:
    """Other seeds, the same bits: sums are formed in one order."""
    schedule, _, tensors = made("qwen3", TILINGS[1], 1)
    first, second = (
        GpuMachine(schedule, tensors.__getitem__, seed).step_once([5]) for seed in (1, 2)
    )
    assert (first == second).all()


def _without_polls(s: GpuSchedule) -> GpuSchedule:
    programs = tuple(tuple(i for i in p if not isinstance(i, Poll)) for p in s.programs)
    return replace(s, programs=programs)


def _early_copies(s: GpuSchedule) -> GpuSchedule:
    rings = tuple(
        replace(r, loader=tuple(replace(c, freed=0) for c in r.loader if isinstance(c, Copy)))
        for r in s.rings
    )
    return replace(s, rings=rings)


def test_unsafe_schedules_show_as_wrong_numbers() -> None:
    """Without polls, or with slots overwritten before their release: NaN, wrong, or stuck."""
    schedule, c, tensors = made("llama", TILINGS[0], 1)
    want = Reference(c, tensors).step(4)
    for spoil in (_without_polls, _early_copies):
        bad = 0
        for seed in range(4):
            machine = GpuMachine(spoil(schedule), tensors.__getitem__, seed)
            try:
                got = machine.step_once([4])[0]
            except (InternalError, ValueError):
                bad += 1
                continue
            bad += not np.allclose(got, want, rtol=1e-6)
        assert bad, spoil.__name__
