"""One lock per cache folder, held by a process while it writes or repairs; readers never take it.

The lock dies with its holder, so a crash leaves none behind. Takes a folder; gives a context
manager that raises `OSError` where the folder cannot be written.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

if sys.platform != "win32":
    import fcntl


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Wait for the folder's lock and hold it. Not re-entrant."""
    handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if sys.platform != "win32":  # no such locks there: SQLite's own remain
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
