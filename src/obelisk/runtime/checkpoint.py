"""Reading a checkpoint's tensors from safetensors files.

Takes a model directory; gives tensors by name as float32 (4-bit ones also as groups), and digests
of the files. Promises to name the tensor that is missing or has another shape, and to keep no more
than one tensor at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (numpy reads bf16 once this is imported)
import numpy as np

from obelisk.base.digest import DIGEST_HEX
from obelisk.base.errors import MissingDependency, ParseError, UserError
from obelisk.runtime.gptq import PER_WORD, Grouped, read_gptq, shapes, unpack

Array = Any
_WEIGHT = ".weight"


def weight_files(folder: str | Path) -> list[Path]:
    """The safetensors files of a directory, in order; raises `UserError` where there are none."""
    found = sorted(Path(folder).glob("*.safetensors"))
    if not found:
        raise UserError(f"{folder} holds no *.safetensors: give the model's directory")
    return found


def file_digests(folder: str | Path) -> dict[str, str]:
    """Digest of every weight file, by its name."""
    out = {}
    for path in weight_files(folder):
        with path.open("rb") as f:
            out[path.name] = hashlib.file_digest(f, "sha256").hexdigest()[:DIGEST_HEX]
    return out


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

    def tensor(self, name: str) -> Array:
        """A tensor as float32; 4-bit ones by their meaning."""
        groups = self.grouped(name)
        if groups is not None:
            return groups.dense()
        return np.asarray(self._get(name)).astype(np.float32, copy=False)


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
