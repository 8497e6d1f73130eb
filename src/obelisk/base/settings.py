"""The only reader of the environment: every variable that changes Obelisk's behaviour is declared
here.

Gives a frozen `Settings`, read once per call of `settings()`; nothing is cached, so that tests may
change a variable.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import platformdirs


@dataclass(frozen=True, slots=True)
class Settings:
    """What the environment says.

    Attributes:
        cache_dir: where results and built kernels are kept (`OBELISK_CACHE`, else the user's cache
            directory).
        compiler: the C compiler's command (`OBELISK_CC`, else `CC`, else `cc`).
        threads: how many threads generated CPU code uses (`OBELISK_THREADS`, else all usable
            cores).
        log_level: `OBELISK_LOG`, a `logging` level name (default WARNING).
        sources: paths of interest for `doctor` (the variables that were set).
    """

    cache_dir: Path
    compiler: str
    threads: int
    log_level: str
    sources: tuple[str, ...]


def usable_cores() -> int:
    """The number of cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def settings() -> Settings:
    """Read the environment now. A thread count that is no positive integer is ignored in favour of
    the cores.
    """
    env = os.environ
    names = ("OBELISK_CACHE", "OBELISK_CC", "CC", "OBELISK_THREADS", "OBELISK_LOG")
    raw_threads = env.get("OBELISK_THREADS", "")
    threads = int(raw_threads) if raw_threads.isdigit() and int(raw_threads) > 0 else usable_cores()
    cache = env.get("OBELISK_CACHE") or platformdirs.user_cache_dir("obelisk", appauthor=False)
    return Settings(
        cache_dir=Path(cache),
        compiler=env.get("OBELISK_CC") or env.get("CC") or "cc",
        threads=threads,
        log_level=env.get("OBELISK_LOG", "WARNING"),
        sources=tuple(n for n in names if n in env),
    )
