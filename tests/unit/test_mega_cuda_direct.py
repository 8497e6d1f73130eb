"""Direct products of 4-bit weights by the kernel's own text on a CPU: how exact they are.

One warp takes 256 columns of inputs into its registers and multiplies two slabs by them
(`om_part_of`); what the sums must be is float64 of the inputs as they were.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests import mega_cuda_twin as twin
from tests.mega_cuda_models import MODELS

from obelisk.machine import find
from obelisk.mega.cuda import emit_cuda
from obelisk.runtime.cuda import CudaLaunch
from obelisk.runtime.gptq import Grouped
from obelisk.runtime.packing import slabs
from obelisk.schedule.gpu_default import (
    default_tiling,
    with_direct,
)
from obelisk.tasks import WeightFormat, Workload, parse_config

if not twin.SUPPORTED or shutil.which("g++") is None:
    pytest.skip("needs g++ on x86-64, to run fibers", allow_module_level=True)

Array = Any
COLS = 256  # two slabs
KERNEL = """
extern "C" __global__ void obelisk_mega(const om_launch &p) {
  om_state s;
  s.p = &p;
  const int lane = threadIdx.x % 32;
  const float *const from = (const float *)p.weights;
  om_part<2 * OM_WARPS> part;
  for (int g = 0; g < 2; g++)
    part.keep(g, *(const float4 *)(from + om_part<2 * OM_WARPS>::column(s, g)));
  part.put_kept(lane);
  om_part<2 * OM_WARPS>::Weights w[1];
  for (int j = 0; j < 2; j++) w[0].load(j, p.keys + j * om_format<4>::BYTES, lane, true);
  float sum[1][2];
  part.multiply<1>(lane, w, sum);
  for (int i = 0; i < 2; i++) {
    for (int d = 1; d < 4; d *= 2) sum[0][i] += __shfl_xor_sync(~0u, sum[0][i], d);
    if (lane % 4 == 0) ((float *)p.values)[8 * i + lane / 4] = sum[0][i];
  }
}
"""


def products(folder: Path, work: Workload, x: Array, g: Grouped) -> Array:
    """Inputs (256,) times weights (16, 256), by the text."""
    machine, model = find("h200"), parse_config(MODELS["llama, groups of 4"])
    tiling = with_direct(model, work, default_tiling(model, work, machine), machine)
    assert tiling is not None
    emitted = emit_cuda(model, work, tiling, machine)
    text = re.sub(r"obelisk_mega\(const", "not_called(const", emitted.source) + KERNEL
    kernel = twin.TwinKernel(
        twin.TwinDevice(), twin.build_twin(text, folder), "", 1, 32, 0
    )  # fmt: skip
    matrix = next(m for m in emitted.layout.layer_matrices if m.cols_padded == COLS)
    rows, out = np.ascontiguousarray(x, np.float32), np.zeros(16, np.float32)
    stored = slabs(g, matrix)[0]  # of the first tile
    kernel.run(CudaLaunch(
        weights=rows.ctypes.data, keys=stored.ctypes.data, values=out.ctypes.data
    ))  # fmt: skip
    return out


def weights(work: Workload, rng: Any) -> tuple[Grouped, Array]:
    """Levels with a scale and a zero for each group, and what they mean."""
    groups = COLS // work.group
    scale = rng.uniform(0.5, 2.0, (16, groups)).astype(np.float16)
    zero = rng.integers(0, 16, (16, groups), np.uint8) if work.zeros else np.full((16, groups), 8)
    q = rng.integers(0, 16, (16, COLS), np.uint8)
    each = [np.repeat(v.astype(np.float64), work.group, 1) for v in (scale, zero)]
    return Grouped(q, scale, zero.astype(np.uint8), work.group), each[0] * (q - each[1])


@pytest.mark.parametrize(("group", "zeros"), [(128, False), (128, True), (64, False), (32, True)])
def test_products_are_as_exact_as_fp32(tmp_path: Path, group: int, zeros: bool) -> None:
    """Inputs of all sizes, weights up to 30: within 2^-16 of the sum of the inputs, which those
    rounded to fp16 miss many times over; what is not finite is told.
    """
    work = Workload(1, 64, WeightFormat.W4A16, group, zeros)
    rng = np.random.default_rng(group + zeros)
    g, w = weights(work, rng)
    x = (rng.standard_normal(COLS) * 10.0 ** rng.uniform(-3, 3, COLS)).astype(np.float32)
    x[5] = np.float32(3e30)
    for small in (np.float32(1), np.float32(1e-25), np.float32(0)):
        x = x * (small if small else np.float32(1e8))
        got = products(tmp_path, work, x, g)
        most = float(np.abs(x.astype(np.float64)).sum()) * 2.0**-16
        error = np.abs(got - w @ x.astype(np.float64))
        assert (error <= most).all(), (error / most).max()
        x[5] = 0  # the next largest is a thousand times smaller
    assert np.isnan(products(tmp_path, work, np.full(COLS, np.inf, np.float32), g)).all()
