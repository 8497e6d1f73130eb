"""Text to tokens and back, through the `tokenizers` library where it is installed.

Takes a model directory with a `tokenizer.json`; gives a `Tokenizer`. Without the library or the
file, the error says so and names the way out: token ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from obelisk.base.errors import MissingDependency, ParseError, UserError

_IDS = "pass token ids with --prompt-ids and --ids"


class Tokenizer:
    """A model's own tokenizer."""

    def __init__(self, folder: str | Path) -> None:
        """Read `tokenizer.json`; raises `UserError`, `ParseError` or `MissingDependency`."""
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise UserError(f"{folder} has no tokenizer.json: {_IDS}")
        try:
            import tokenizers
        except ImportError:
            raise MissingDependency(
                f"text prompts need tokenizers: pip install 'obelisk[serve]', or {_IDS}"
            ) from None
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises its own base class of all errors
            raise ParseError(f"{path} is no tokenizer: {error}") from None

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the special tokens that the tokenizer adds."""
        return list(self._tokenizer.encode(text).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""
        return str(self._tokenizer.decode(list(ids)))
