"""Sessions of small models on the GPU at hand, for the megakernel's device tests.

Importing it where there is no device or no compiler skips the module that imports it, loudly.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from obelisk.app.synth_cuda import device_here, make_cuda_plan
from obelisk.base.errors import MissingDependency, UserError
from obelisk.machine import Machine
from obelisk.plan import Plan
from obelisk.runtime import CudaSession
from obelisk.runtime.cuda import CACHES
from obelisk.runtime.packing import pack, stored
from obelisk.schedule.gpu_default import default_tiling
from obelisk.tasks import Workload, parse_config, parse_format
from tests.mega_cuda_checks import changed
from tests.mega_cuda_models import Rounded

Array = Any

try:
    MACHINE: Machine = device_here()
except (MissingDependency, UserError) as missing:
    pytest.skip(f"no CUDA device here: {missing}", allow_module_level=True)


def device_plan(
    c: dict[str, Any], batch: int = 1, context: int = 160, form: str = "bf16", changes: str = "",
    blocks: int | None = None,
) -> Plan:  # fmt: skip
    """A plan under the default tiling with changes, without a search."""
    model, work = parse_config(c), Workload(batch, context, parse_format(form))
    tiling = changed(default_tiling(model, work, MACHINE, blocks), changes)
    return make_cuda_plan(model, work, tiling, MACHINE)


def device_session(
    c: dict[str, Any], tensors: dict[str, Array], batch: int = 1, context: int = 160,
    form: str = "bf16", changes: str = "", blocks: int | None = None,
) -> CudaSession:  # fmt: skip
    """A session of that plan with these weights."""
    plan = device_plan(c, batch, context, form, changes, blocks)
    return CudaSession(plan, pack(plan.layout, tensors.__getitem__))


def reference(c: dict[str, Any], tensors: dict[str, Array], plan: Plan) -> Rounded:
    """The float64 reference that rounds where the kernel does, on the weights as stored."""
    means = stored(plan.layout, tensors.__getitem__)
    return Rounded(
        c, {k: means(k) for k in tensors}, plan.cache.format, plan.schedule["tiling"]["kv_pieces"]
    )


def logits_apart(session: CudaSession, ref: Rounded, tokens: list[int]) -> float:
    """The largest error of all logits while `tokens` go through slot 0, one launch each, relative
    to the largest logit of their step.
    """
    session.keep_logits, worst = True, 0.0
    for token in tokens:
        session.launch([[token]], [1])
        want = ref.step(token)
        got = session.logits()[0]
        worst = max(worst, float(np.abs(got - want).max() / np.abs(want).max()))
    return worst


def cache_of(session: CudaSession) -> tuple[Array, Array]:
    """Keys and values as float32."""
    return session.cached(session.plan.context)


def set_cache(session: CudaSession, keys: Array, values: Array) -> None:
    """Write keys and values, as a prefill of somebody else would."""
    kind = CACHES[session.plan.cache.format]
    session.device.upload(session.key_memory, keys.astype(kind))
    session.device.upload(session.value_memory, values.astype(kind))


def prompts_of(lengths: list[int], vocab: int, seed: int = 0) -> list[list[int]]:
    """Random prompts."""
    rng = np.random.default_rng(seed)
    return [[int(t) for t in rng.integers(0, vocab, n)] for n in lengths]
