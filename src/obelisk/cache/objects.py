"""Content-addressed files beside the database: built libraries, chosen graphs, reports.

Takes bytes; gives a path whose name is the content's sha256. Files appear by rename, so that no
reader sees half of one, and are checked against their name whenever they are read.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from obelisk.base.errors import CacheCorrupt

FOLDER = "objects"


def sha256(data: bytes) -> str:
    """Hex digest."""
    return hashlib.sha256(data).hexdigest()


class Objects:
    """The objects of one cache folder."""

    def __init__(self, root: Path) -> None:
        self.root = root / FOLDER

    def path(self, sha: str, suffix: str = "") -> Path:
        """Where the object with this digest lies, present or not."""
        return self.root / sha[:2] / (sha + suffix)

    def put(self, data: bytes, suffix: str = "") -> str:
        """Store bytes and give their digest; a damaged file of that name is replaced. Raises
        `OSError`.
        """
        sha = sha256(data)
        target = self.path(sha, suffix)
        if (
            target.is_file()
            and target.stat().st_size == len(data)
            and sha256(target.read_bytes()) == sha
        ):
            return sha
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=".new-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.chmod(temporary, 0o644)
            if target.exists():  # damaged, or it would have been kept
                os.replace(target, target.with_name(target.name + ".corrupt"))
            os.replace(temporary, target)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        return sha

    def check(self, sha: str, suffix: str = "") -> Path:
        """The path of a stored object after reading it; raises `CacheCorrupt` naming the path and
        what is wrong.
        """
        target = self.path(sha, suffix)
        try:
            data = target.read_bytes()
        except OSError as e:
            raise CacheCorrupt(f"{target} cannot be read: {e.strerror or e}") from e
        if sha256(data) != sha:
            raise CacheCorrupt(f"{target} does not match its sha256 ({len(data)} bytes)")
        return target

    def all(self) -> Iterator[Path]:
        """Every stored file, in a fixed order."""
        if self.root.is_dir():
            yield from sorted(p for p in self.root.glob("*/*") if p.is_file())
