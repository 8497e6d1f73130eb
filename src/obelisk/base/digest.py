"""Content digests: short, stable across processes and machines, independent of Python's hash seed."""

from __future__ import annotations

import hashlib

DIGEST_HEX = 24  # 96 bits: no accidental collision among 2^40 graphs


def digest(*parts: str | bytes) -> str:
    """The digest of a sequence of parts. Parts are length-prefixed, so `("ab", "c")` and `("a", "bc")` differ."""
    h = hashlib.sha256()
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        h.update(len(raw).to_bytes(8, "little"))
        h.update(raw)
    return h.hexdigest()[:DIGEST_HEX]
