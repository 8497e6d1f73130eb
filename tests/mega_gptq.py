"""4-bit checkpoints in the GPTQ layout, written from the layout's description for the tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

Array = Any


def _words(levels: Array) -> Array:
    """Levels (8 n, ...) as i32 (n, ...), the first in the lowest four bits."""
    out = np.zeros((levels.shape[0] // 8, *levels.shape[1:]), np.uint32)
    for i in range(levels.shape[0]):
        out[i // 8] |= levels[i].astype(np.uint32) << np.uint32(4 * (i % 8))
    return out.view(np.int32)


def quantised(
    w: Array, group: int, symmetric: bool, version: int, rng: np.random.Generator
) -> tuple[dict[str, Array], Array]:
    """The tensors of a matrix (out, in) by suffix, and the float32 matrix that they mean."""
    rows, cols = w.shape
    groups = -(-cols // group)
    q, means = np.zeros((cols, rows), np.int64), np.zeros_like(w)
    scales, zeros = np.zeros((groups, rows), np.float16), np.full((groups, rows), 8, np.int64)
    for g in range(groups):
        part = w[:, g * group : (g + 1) * group]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        step = 2 * np.abs(part).max(1) / 15 if symmetric else (high - low) / 15
        scales[g] = step.astype(np.float16)
        step = scales[g].astype(np.float32)
        if not symmetric:
            zeros[g] = np.clip(np.rint(-low / step), 0, 15)
            zeros[g, rng.integers(0, rows, 2)] = (0, 15)  # the least and the largest
        level = np.clip(np.rint(part / step[:, None]) + zeros[g][:, None], 0, 15)
        q[g * group : (g + 1) * group] = level.T
        means[:, g * group : (g + 1) * group] = (level - zeros[g][:, None]) * step[:, None]
    packed = _words(zeros.T).view(np.uint32)  # (rows / 8, groups)
    if version == 1:
        packed = packed - np.uint32(0x11111111)
    tensors = {
        "qweight": _words(q),
        "qzeros": np.ascontiguousarray(packed.T).view(np.int32),
        "scales": scales,
        "g_idx": (np.arange(cols) // group).astype(np.int32),
    }
    return tensors, means


def save_gptq(
    folder: Path, c: dict[str, Any], tensors: dict[str, Array], group: int = 128,
    symmetric: bool = True, version: int = 1, **section: Any,
) -> dict[str, Array]:  # fmt: skip
    """Write a model whose layers' matrices are 4-bit and the rest fp16; gives what it means.

    `section` changes fields of `quantization_config`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(group)
    stored: dict[str, Array] = {}
    means: dict[str, Array] = {}
    for name, w in tensors.items():
        if name.endswith("_proj.weight"):
            parts, means[name] = quantised(w, group, symmetric, version, rng)
            base = name.removesuffix(".weight")
            stored |= {f"{base}.{k}": v for k, v in parts.items()}
            if base + ".bias" not in tensors:  # some writers add biases of zeros
                stored[base + ".bias"] = np.zeros(w.shape[0], np.float16)
        else:
            stored[name] = w.astype(np.float16)
            means[name] = stored[name].astype(np.float32)
    quantisation = {
        "quant_method": "gptq", "bits": 4, "group_size": group, "sym": symmetric,
        "desc_act": False, "checkpoint_format": "gptq" if version == 1 else "gptq_v2", **section,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps({**c, "quantization_config": quantisation}))
    save_file(stored, str(folder / "model.safetensors"))
    return means
