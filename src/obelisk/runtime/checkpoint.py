"""Reading a checkpoint's tensors from safetensors files.

Takes a model directory; gives tensors by name as float32 (4-bit ones also as groups), and digests
of the files. Promises to name the tensor that is missing or has another shape, and to keep no
tensor. Several threads may read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from obelisk.base.digest import DIGEST_HEX
from obelisk.base.errors import MissingDependency, ParseError, UserError
from obelisk.base.settings import usable_cores
from obelisk.runtime.gptq import PER_WORD, Grouped, read_gptq, shapes, unpack

Array = Any
_WEIGHT = ".weight"
_TYPES: dict[str, Any] = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}


def weight_files(folder: str | Path) -> list[Path]:
    """The safetensors files of a directory, in order; raises `UserError` where there are none."""
    found = sorted(Path(folder).glob("*.safetensors"))
    if not found:
        raise UserError(f"{folder} holds no *.safetensors: give the model's directory")
    return found


def file_digests(folder: str | Path) -> dict[str, str]:
    """Digest of every weight file, by its name."""

    def one(path: Path) -> str:
        with path.open("rb") as f:
            return hashlib.file_digest(f, "sha256").hexdigest()[:DIGEST_HEX]

    paths = weight_files(folder)
    with ThreadPoolExecutor(usable_cores()) as pool:  # hashing lets other threads run
        return dict(zip((p.name for p in paths), pool.map(one, paths), strict=True))


class Checkpoint:
    """The tensors of a directory, by name; `gptq` says how 4-bit ones are stored (None: none)."""

    def __init__(self, folder: str | Path) -> None:
        """Open every file; raises `MissingDependency` without safetensors, `ParseError` for a file
        that is none, and what `read_gptq` raises for a quantisation that is not supported.
        """
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError:
            raise MissingDependency(
                "reading weights needs safetensors: pip install 'obelisk[serve]'"
            ) from None
        self.folder = Path(folder)
        self._where: dict[str, Any] = {}
        for path in weight_files(folder):
            try:
                handle = safe_open(path, framework="numpy")
            except SafetensorError as error:
                raise ParseError(f"{path} is no safetensors file: {error}") from None
            files: Any = handle
            self._where |= dict.fromkeys(files.keys(), files)
        self.gptq = read_gptq(folder)
        self._views: dict[str, Array] | None = None

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._where[name].get_slice(name).get_shape())

    def _get(self, name: str) -> Array:
        try:
            return self._where[name].get_tensor(name)
        except (AttributeError, TypeError):  # numpy has no such type
            kind = self._where[name].get_slice(name).get_dtype()
            raise UserError(
                f"{name} in {self.folder} is stored as {kind}; F32, BF16 and F16 are read"
            ) from None

    def _base(self, name: str) -> str | None:
        """`a.b` of a weight a.b.weight that is stored in groups; None for others."""
        base = name.removesuffix(_WEIGHT)
        stored = self.gptq and name.endswith(_WEIGHT) and base + ".qweight" in self._where
        return base if stored else None

    def check(self, tensors: Iterable[tuple[str, tuple[int, ...]]], layers: int) -> None:
        """Raise `UserError` naming the first tensor that is missing or has another shape, and the
        first bias that is not zero in a place where the model has none.
        """
        known = set()
        for name, shape in tensors:
            for layer in range(layers) if "{layer}" in name else (0,):
                full = name.format(layer=layer)
                known.add(full)
                base = self._base(full)
                parts = {full: tuple(shape)} if base is None else self._grouped(base, shape)
                for part, expected in parts.items():
                    if part not in self._where:
                        hint = ""
                        if part.startswith("lm_head"):
                            hint = " (the configuration says that the head is not tied)"
                        raise UserError(f"{self.folder} has no tensor {part}{hint}")
                    if self._shape(part) != expected:
                        raise UserError(
                            f"{part} in {self.folder} has shape {self._shape(part)}, "
                            f"expected {expected}"
                        )
        for name in sorted(self._where):
            mine = name.startswith(("model.layers.", "lm_head.")) and name.endswith(".bias")
            if mine and name not in known and self._get(name).any():
                raise UserError(
                    f"{self.folder} holds {name}, which is not zero, but its configuration has no "
                    "such bias"
                )

    def _grouped(self, base: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        assert self.gptq is not None
        rows, cols = shape
        if rows % PER_WORD or cols % PER_WORD:
            raise UserError(
                f"{base} has {rows} rows and {cols} columns: 4-bit weights come in words of "
                f"{PER_WORD}"
            )
        return {f"{base}.{k}": v for k, v in shapes(rows, cols, self.gptq.group).items()}

    def grouped(self, name: str) -> Grouped | None:
        """A weight's 4-bit groups; None where it is stored dense. Raises what `unpack` raises."""
        base = self._base(name)
        if base is None:
            return None
        assert self.gptq is not None
        index = base + ".g_idx"
        order = self._get(index) if index in self._where else None
        return unpack(base, self._get, self.gptq, order)

    def raw(self, name: str) -> Array | None:
        """A tensor as its file holds it, without a copy: a view of the file's pages. None where it
        is stored in groups, or as a type that numpy does not have.
        """
        if self._views is None:
            views: dict[str, Array] = {}
            for path in weight_files(self.folder):
                views |= _mapped(path)
            self._views = views  # whole: threads may ask at the same time
        return None if self._base(name) is not None else self._views.get(name)

    def rows(self, name: str, which: slice) -> Array | None:
        """Some rows of a tensor, as its file holds them, without reading the others; None where
        `raw` gives none.
        """
        found = self.raw(name)
        return None if found is None else found[which]

    def tensor(self, name: str) -> Array:
        """A tensor as float32; 4-bit ones by their meaning."""
        groups = self.grouped(name)
        if groups is not None:
            return groups.dense()
        return np.asarray(self._get(name)).astype(np.float32, copy=False)


def _mapped(path: Path) -> dict[str, Array]:
    """A safetensors file's tensors of `_TYPES` as views of its pages: eight bytes with the header's
    length, the header (JSON), the data.
    """
    with path.open("rb") as f:
        length = int.from_bytes(f.read(8), "little")
        header: dict[str, Any] = json.loads(f.read(length))
    data = np.memmap(path, np.uint8, "r", 8 + length) if path.stat().st_size > 8 + length else None
    out = {}
    for name, item in header.items():
        kind = _TYPES.get(item.get("dtype", ""))
        if kind is None or data is None:
            continue
        first, last = item["data_offsets"]
        if first % np.dtype(kind).itemsize == 0:
            out[name] = data[first:last].view(kind).reshape(item["shape"]).view(np.ndarray)
    return out


def differing(expected: Mapping[str, str], found: Mapping[str, str]) -> str | None:
    """The first file whose digest is not the expected one, with the reason; None when all agree."""
    for name in sorted({*expected, *found}):
        if name not in found:
            return f"{name} is missing"
        if name not in expected:
            return f"{name} is not one of the plan's files"
        if expected[name] != found[name]:
            return f"{name} has other content"
    return None
