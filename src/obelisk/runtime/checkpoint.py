"""Reading a checkpoint's tensors from safetensors files.

Takes a model directory; gives tensors by name as float32, and digests of the files. Promises to
name the tensor that is missing or has another shape, and to keep no more than one tensor at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from obelisk.base.digest import DIGEST_HEX
from obelisk.base.errors import MissingDependency, ParseError, UserError

Array = Any


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
    """The tensors of a directory, by name."""

    def __init__(self, folder: str | Path) -> None:
        """Open every file; raises `MissingDependency` without safetensors, `ParseError` for a file
        that is none.
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

    def check(self, tensors: Iterable[tuple[str, tuple[int, ...]]], layers: int) -> None:
        """Raise `UserError` naming the first tensor that is missing or has another shape."""
        for name, shape in tensors:
            for layer in range(layers) if "{layer}" in name else (0,):
                full = name.format(layer=layer)
                if full not in self._where:
                    hint = ""
                    if full.startswith("lm_head"):
                        hint = " (the configuration says that the head is not tied)"
                    raise UserError(f"{self.folder} has no tensor {full}{hint}")
                got = tuple(self._where[full].get_slice(full).get_shape())
                if got != tuple(shape):
                    raise UserError(f"{full} in {self.folder} has shape {got}, expected {shape}")

    def tensor(self, name: str) -> Array:
        """A tensor as float32."""
        return np.asarray(self._where[name].get_tensor(name)).astype(np.float32, copy=False)


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
