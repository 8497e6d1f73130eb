"""How weights and the key-value cache lie in memory: records alone, without any model knowledge.

Gives `MatrixLayout`, `VectorLayout` and `WeightLayout` (one arena: a global part, then one equal
part for each layer) and `CacheLayout`. A matrix is stored in panels of `panel` rows; within a
panel the columns advance `lanes` at a time, and of each such chunk all rows lie side by side, so
that a product reads one sequential stream:

    index(r, c) = ((r // panel) * (cols_padded // lanes) + c // lanes) * panel * lanes
                  + (r % panel) * lanes + c % lanes        (in elements)

4-bit weights (`w4a16`) lie in 32-bit words of 8 columns, `lanes` apart: the same formula with words
for elements, 8 * lanes columns to a chunk, and

    word(r, c) = ((r // panel) * (cols_padded // (8 * lanes)) + c // (8 * lanes)) * panel * lanes
                 + (r % panel) * lanes + c % lanes
    bits of (r, c) in it: 4 * j to 4 * j + 3, j = c // lanes % 8
    group(r, g) = ((r // panel) * groups + g) * panel + r % panel      (of scales, and of zeros)

With `fragments` (panel 16, lanes 32), the 512 elements of 16 rows by 32 columns lie as a warp's
lanes read the A operand of two steps of m16n8k16: of row 8 h + g, column 8 q + 4 s + 2 t + e, at

    256 s + 8 (4 g + q) + 4 t + 2 h + e            (lane 4 g + q, step s, register 2 t + h)

fp32 with `fragments` is for lanes that multiply by themselves, with 4 columns of 4 rows each: of
row 8 h + 2 g + p, column 4 q + e, at

    128 (2 h + p) + 4 (8 g + q) + e                (lane 8 g + q, load 2 h + p)

int8: as lanes read the A operand of one step of m16n8k32, of row 8 h + g, column 8 q + 4 s + i at

    16 (4 g + q) + 8 s + 4 h + i                   (in two's complement)

w4a16 has lanes 128, in *slabs* of 16 rows by 128 columns: 256 words, then the groups' scales, then
their zeros. Columns 64 f + 32 j + 8 q + 4 s + i of rows 8 h + g lie in

    word 128 f + 4 (4 g + q) + 2 j + s, bits 8 i + 4 h to 8 i + 4 h + 3
    scale (fp16) and zero (u8) of group i of the slab: element 2 (i + g * 128 / group) + h
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

ALIGN = 64  # bytes: a cache line; every tensor of an arena begins on one
BITS = {"fp32": 32, "bf16": 16, "fp16": 16, "int8": 8, "w4a16": 4}  # of one weight, by format
WORD = 8  # 4-bit weights of a word


def align(size: int, to: int = ALIGN) -> int:
    """`size` rounded up to a multiple of `to`."""
    return -(-size // to) * to


@dataclass(frozen=True, slots=True)
class RowBlock:
    """`count` rows of each of `tensors`, from `start` on, `every` rows of each in turn.

    One tensor: its rows in order. Two tensors with `every` 4: four rows of the first, four of the
    second, and so on; a last short turn is filled up to `every` with zeros. `pad` zero rows follow.
    """

    tensors: tuple[str, ...]
    start: int
    count: int
    every: int = 0
    pad: int = 0

    @property
    def rows(self) -> int:
        """Rows in the packed matrix, zeros included."""
        if len(self.tensors) == 1:
            return self.count + self.pad
        return align(self.count, self.every) * len(self.tensors) + self.pad


@dataclass(frozen=True, slots=True)
class MatrixLayout:
    """One packed matrix.

    Attributes:
        name: what the kernel calls it.
        blocks: where its rows come from; names may hold `{layer}`.
        rows, cols: packed rows (a multiple of `panel`) and true columns.
        cols_padded: columns as stored, a multiple of `lanes` (w4a16: of 8 * `lanes`).
        panel, lanes: see the module's text.
        format: fp32, bf16, fp16, int8 or w4a16.
        offset: bytes from the start of its part of the arena.
        scale_offset: int8: bytes to its `rows` fp32 scales; w4a16: to its `rows` * `groups` fp16
            scales (with `fragments` from the start of a slab); else -1.
        group: w4a16 alone: columns that share a scale; else 0.
        zero_offset: w4a16 alone: bytes to its uint8 zeros (with `fragments` from the start of a
            slab); -1: every zero is 8.
        fragments: whether each block of 16 by 32 is stored as a warp's lanes multiply it.
    """

    name: str
    blocks: tuple[RowBlock, ...]
    rows: int
    cols: int
    cols_padded: int
    panel: int
    lanes: int
    format: str
    offset: int
    scale_offset: int = -1
    group: int = 0
    zero_offset: int = -1
    fragments: bool = False

    @property
    def groups(self) -> int:
        """Groups of a row, padding included."""
        return -(-self.cols_padded // self.group) if self.group else 0

    @property
    def slab_bytes(self) -> int:
        """w4a16 with `fragments`: bytes of 16 rows by 128 columns, scales and zeros included."""
        numbers = self.panel * self.lanes // self.group
        return self.panel * self.lanes // 2 + numbers * (2 if self.zero_offset < 0 else 3)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights, without the scales and zeros that lie apart from them."""
        if self.fragments and self.group:
            return self.rows // self.panel * (self.cols_padded // self.lanes) * self.slab_bytes
        return self.rows * self.cols_padded * BITS[self.format] // 8


@dataclass(frozen=True, slots=True)
class VectorLayout:
    """One fp32 vector (a gain or a bias): `blocks` of elements, at `offset` bytes of its part."""

    name: str
    blocks: tuple[RowBlock, ...]
    size: int
    offset: int


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """The arena: the global part, then `layers` parts of `layer_bytes`, from `layer_offset` on."""

    matrices: tuple[MatrixLayout, ...]
    vectors: tuple[VectorLayout, ...]
    layer_matrices: tuple[MatrixLayout, ...]
    layer_vectors: tuple[VectorLayout, ...]
    layers: int
    layer_offset: int
    layer_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole arena."""
        return self.layer_offset + self.layers * self.layer_bytes

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads back."""
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> WeightLayout:
        """The inverse of `to_json`."""

        def blocks(item: Mapping[str, Any]) -> dict[str, Any]:
            made = tuple(RowBlock(**{**b, "tensors": tuple(b["tensors"])}) for b in item["blocks"])
            return {**item, "blocks": made}

        return WeightLayout(
            matrices=tuple(MatrixLayout(**blocks(m)) for m in data["matrices"]),
            vectors=tuple(VectorLayout(**blocks(v)) for v in data["vectors"]),
            layer_matrices=tuple(MatrixLayout(**blocks(m)) for m in data["layer_matrices"]),
            layer_vectors=tuple(VectorLayout(**blocks(v)) for v in data["layer_vectors"]),
            layers=data["layers"],
            layer_offset=data["layer_offset"],
            layer_bytes=data["layer_bytes"],
        )


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The key-value cache: two dense tensors of `format` (fp32, bf16 or fp16), keys then values.

    Each is (layers, slots, kv_heads, context, head_dim), row-major; keys are stored after their
    norm and rotary embedding. A prefill outside the kernel may write positions in place.
    """

    layers: int
    slots: int
    kv_heads: int
    context: int
    head_dim: int
    format: str = "fp32"

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """The shape of keys, and of values."""
        return (self.layers, self.slots, self.kv_heads, self.context, self.head_dim)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values together."""
        elements = self.layers * self.slots * self.kv_heads * self.context * self.head_dim
        return 2 * elements * BITS[self.format] // 8

    def to_json(self) -> dict[str, Any]:
        """A JSON object of the fields."""
        return asdict(self)
