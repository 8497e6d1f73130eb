"""The inputs of narrow weights as digits, by the kernel's own text on a CPU: how exact they are.

One warp writes a slab's digits (`om_put_digits`), multiplies a slab of 8-bit weights by them
(`om_format<8>`), and leaves the sums; what they must be is float64 of the inputs as they were.
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
from obelisk.schedule.gpu_default import default_tiling
from obelisk.tasks import WeightFormat, Workload, parse_config

if not twin.SUPPORTED or shutil.which("g++") is None:
    pytest.skip("needs g++ on x86-64, to run fibers", allow_module_level=True)

Array = Any
COLS = 256  # two slabs
KERNEL = """
extern "C" __global__ void obelisk_mega(const om_launch &p) {
  const int lane = threadIdx.x % 32;
  const float *const from = (const float *)p.weights;
  char *const w = om_memory + 8192;
  for (int slot = 0; slot < OM_BATCH; slot++) {
#if EACH == 4
    for (int slab = 0; slab < 2; slab++) {
      float x[4];
      for (int i = 0; i < 4; i++) x[i] = from[slot * 256 + slab * 128 + 4 * lane + i];
      om_put_digits<4>(slot, slab * 128 + 4 * lane, lane, x, true);
    }
#else
    float x[8];
    for (int i = 0; i < 8; i++) x[i] = from[slot * 256 + 8 * lane + i];
    om_put_digits<8>(slot, 8 * lane, lane, x, true);
#endif
  }
  for (int i = lane; i < 4096; i += 32) w[i] = p.keys[i];
  __syncthreads();
  om_format<8> f;
  for (int slab = 0; slab < 2; slab++) {
    const char *const x = om_memory + slab * om_format<8>::STRIDE;
    f.add<0>(w + slab * 2048, lane, x, om_format<8>::inputs(x, lane));
  }
  float v[4];
  f.take(v);
  float *const out = (float *)p.values;
  for (int j = 0; j < 2; j++) {
    const int slot = lane % 4 * 2 + j;
    if (slot < OM_BATCH) out[slot * 16 + lane / 4] = v[j], out[slot * 16 + 8 + lane / 4] = v[2 + j];
  }
}
"""


def products(folder: Path, batch: int, each: int, x: Array, w: Array) -> Array:
    """Inputs (batch, 256) times weights (16, 256), by the text; `each` columns a lane."""
    machine, model = find("h200"), parse_config(MODELS["llama, groups of 4"])
    work = Workload(batch, 64, WeightFormat.INT8)
    text = emit_cuda(model, work, default_tiling(model, work, machine), machine).source
    text = re.sub(r"obelisk_mega\(const", "not_called(const", text) + f"#define EACH {each}\n"
    kernel = twin.TwinKernel(
        twin.TwinDevice(), twin.build_twin(text + KERNEL, folder), "", 1, 32, 0
    )
    cut = w.reshape(2, 8, 8, 4, 2, 4)  # h, g, block, q, s, i
    stored = np.ascontiguousarray(cut.transpose(2, 1, 3, 4, 0, 5))  # block, g, q, s, h, i
    rows, out = np.ascontiguousarray(x, np.float32), np.zeros((batch, 16), np.float32)
    kernel.run(CudaLaunch(
        weights=rows.ctypes.data, keys=stored.ctypes.data, values=out.ctypes.data
    ))  # fmt: skip
    return out


@pytest.mark.parametrize(("batch", "each"), [(1, 4), (1, 8), (2, 8), (5, 4)])
def test_products_are_as_exact_as_fp32(tmp_path: Path, batch: int, each: int) -> None:
    """Inputs of all sizes, the largest of a slab in any place: within 2^-22 of that for each, which
    fp16 would miss by three digits; slabs and slots do not touch each other.
    """
    rng = np.random.default_rng(batch)
    x = (rng.standard_normal((batch, COLS)) * 10.0 ** rng.uniform(-3, 3, (batch, COLS))).astype(
        np.float32
    )
    x[:, 128:] *= np.float32(1e-12)
    x[0, 5] = np.float32(3e35)
    w = rng.integers(-127, 128, (16, COLS), np.int8)
    got = products(tmp_path, batch, each, x, w)
    largest = np.abs(x.reshape(batch, 2, 128)).max(2).astype(np.float64)
    size = np.abs(w.astype(np.float64)).reshape(16, 2, 128).sum(2)
    most = largest @ size.T * 2.0**-22
    assert (np.abs(got - x.astype(np.float64) @ w.astype(np.float64).T) <= most).all()
    x[0, 5] = 0
    small = products(tmp_path, batch, each, x * np.float32(1e-30), w)
    assert np.isfinite(small).all()


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_what_is_not_finite_is_told(tmp_path: Path, bad: float) -> None:
    """One number of a slot spoils that slot's products, and no other's."""
    x = np.ones((2, COLS), np.float32)
    x[1, 77] = bad
    got = products(tmp_path, 2, 8, x, np.ones((16, COLS), np.int8))
    assert np.isnan(got[1]).all()
    assert (got[0] == COLS).all()
