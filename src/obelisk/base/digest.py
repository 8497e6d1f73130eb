"""Content digests: short, the same in every process and on every machine.

Takes parts of text or bytes; gives a hexadecimal string that does not depend on Python's hash seed.
"""

from __future__ import annotations

import hashlib

DIGEST_HEX = 24  # 96 bits: no accidental collision among 2^40 graphs


def digest(*parts: str | bytes) -> str:
    """The digest of a sequence of parts, each length-prefixed.

    So `("ab", "c")` and `("a", "bc")` differ.
    """
    h = hashlib.sha256()
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        h.update(len(raw).to_bytes(8, "little"))
        h.update(raw)
    return h.hexdigest()[:DIGEST_HEX]
