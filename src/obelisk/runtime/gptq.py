"""4-bit checkpoints in the GPTQ layout: what their configuration says, and their groups.

A quantised matrix (out, in) is four tensors of the checkpoint, written for in = 8 i + j:

    qweight  i32 (in / 8, out)            bits 4 j .. 4 j + 3 of [i, o]: weight (o, in)
    qzeros   i32 (groups, out / 8)        bits 4 j .. 4 j + 3 of [g, i]: zero of row 8 i + j, each
                                          word less 0x11111111
    scales   f16 (groups, out)
    g_idx    i32 (in,)                    the group of each column (may be absent)

and means w = (q - zero) * scale. `checkpoint_format` "gptq_v2" takes nothing off the zeros. Groups
are runs of `group` columns; columns ordered otherwise (act-order) are refused by name, as are other
methods and widths.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from obelisk.base.errors import ParseError, UnknownName, UserError

Array = Any
BITS, PER_WORD = 4, 8
GROUPS = (32, 64, 128)
PARTS = ("qweight", "qzeros", "scales")
_LESS = 0x11111111  # one off each of a word's eight zeros


def by_groups(w: Array, group: int) -> Array:
    """A matrix (rows, cols) as (rows, groups, group), zeros behind the last column."""
    spare = -w.shape[1] % group
    wide = np.pad(w, ((0, 0), (0, spare))) if spare else w
    return wide.reshape(len(w), -1, group)


@dataclass(frozen=True, slots=True)
class Gptq:
    """What the configuration says: columns of a group, whether zeros are all 8, and what was taken
    off each word of zeros.
    """

    group: int
    symmetric: bool
    zero_offset: int = _LESS


@dataclass(frozen=True, slots=True)
class Grouped:
    """A matrix (out, in) of 4-bit weights: w = (q - zero) * scale of its row and group.

    Attributes:
        q: uint8 (out, in), 0 to 15.
        scale: float16 (out, groups).
        zero: uint8 (out, groups), 0 to 15.
        group: columns of a group; the last one may be shorter.
    """

    q: Array
    scale: Array
    zero: Array
    group: int

    def dense(self) -> Array:
        """float32 (out, in)."""
        w = by_groups(self.q, self.group).astype(np.float32)
        w -= self.zero[:, :, None]
        w *= self.scale.astype(np.float32)[:, :, None]
        return w.reshape(len(self.q), -1)[:, : self.q.shape[1]]


def parse_gptq(data: Mapping[str, Any], source: str) -> Gptq | None:
    """The quantisation of a decoded `config.json`; None where the weights are dense.

    Raises `UnknownName` for another method, width, group or checkpoint format, `ParseError` for a
    section that is no object.
    """
    section = data.get("quantization_config")
    if section is None:
        return None
    if not isinstance(section, Mapping):
        raise ParseError(f"{source}: quantization_config is {section!r}, expected an object")
    method = section.get("quant_method", "gptq")
    if method != "gptq":
        raise UnknownName(f"{source}: quant_method {method!r} is not supported: known is gptq")
    if section.get("bits") != BITS:
        raise UnknownName(f"{source}: {section.get('bits')!r} bits are not supported: known is 4")
    group = section.get("group_size")
    if group not in GROUPS:
        known = ", ".join(map(str, GROUPS))
        raise UnknownName(f"{source}: group_size {group!r} is not supported: known are {known}")
    form = section.get("checkpoint_format", "gptq")
    if form not in ("gptq", "gptq_v2"):
        raise UnknownName(
            f"{source}: checkpoint_format {form!r} is not supported: known are gptq, gptq_v2"
        )
    return Gptq(int(group), bool(section.get("sym", True)), _LESS if form == "gptq" else 0)


def read_gptq(folder: str | Path) -> Gptq | None:
    """The quantisation that a model directory's `config.json` (or, in older checkpoints, its
    `quantize_config.json`) describes; None where there is none. Raises what `parse_gptq` raises.
    """
    for name in ("config.json", "quantize_config.json"):
        path = Path(folder) / name
        if not path.is_file():
            continue
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ParseError(f"{path} is no JSON: {error}") from None
        if not isinstance(data, dict):
            raise ParseError(f"{path} holds a {type(data).__name__}, expected an object")
        found = parse_gptq(data if name == "config.json" else {"quantization_config": data},
                           str(path))  # fmt: skip
        if found is not None:
            return found
    return None


def _nibbles(words: Array) -> Array:
    """int32 (..., n) as uint8 (..., n, 8), the lowest four bits first."""
    pairs = np.ascontiguousarray(words).astype("<u4", copy=False).view(np.uint8)
    out = np.empty((*pairs.shape, 2), np.uint8)
    np.bitwise_and(pairs, 15, out=out[..., 0])
    np.right_shift(pairs, 4, out=out[..., 1])
    return out.reshape(*words.shape, PER_WORD)


def shapes(rows: int, cols: int, group: int) -> dict[str, tuple[int, int]]:
    """The shapes of a quantised (rows, cols) matrix's tensors."""
    groups = -(-cols // group)
    return {
        "qweight": (cols // PER_WORD, rows),
        "qzeros": (groups, rows // PER_WORD),
        "scales": (groups, rows),
    }


def unpack(base: str, get: Callable[[str], Array], what: Gptq, index: Array | None) -> Grouped:
    """The matrix whose tensors are `base`.qweight and so on, read by `get`; `index` is its g_idx.

    Raises `UserError` for columns that are not in order (act-order) and for zeros that a symmetric
    checkpoint must not have.
    """
    words = get(base + ".qweight")
    q = np.ascontiguousarray(_nibbles(words.T).reshape(words.shape[1], -1))
    if index is not None and not np.array_equal(index, np.arange(q.shape[1]) // what.group):
        raise UserError(
            f"{base} orders its columns by activation (desc_act): that is not supported; use a "
            "checkpoint that was quantised with desc_act false"
        )
    stored = np.ascontiguousarray(get(base + ".qzeros")).view(np.uint32)
    zeros = stored + np.uint32(what.zero_offset)  # a zero of 0 borrows from the next one
    zero = np.ascontiguousarray(_nibbles(zeros).reshape(zeros.shape[0], -1).T)
    if what.symmetric and not (zero == 8).all():
        raise UserError(f"{base}.qzeros are not all 8, but quantization_config says sym")
    scale = np.ascontiguousarray(np.asarray(get(base + ".scales")).astype(np.float16).T)
    return Grouped(q, scale, zero, what.group)
