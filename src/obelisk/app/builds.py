"""Builds on their way, and how fast they were: what a report says of compiling.

Wraps a back end's builder. It promises the time during which anything was being built, whatever
pauses lay between, and counts each kernel once however many modules share it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from threading import Lock
from typing import Any

from obelisk.app.backends import Lowering

Build = Callable[[Lowering], Future[Any]]


class Builds:
    """Starts builds; `busy` are the seconds with at least one of them under way."""

    def __init__(self, build: Build) -> None:
        self.build = build
        self.busy = 0.0
        self._under_way, self._since = 0, 0.0
        self._lock = Lock()

    def __call__(self, made: Lowering) -> Future[Any]:
        """Start one."""
        with self._lock:
            if not self._under_way:
                self._since = time.monotonic()
            self._under_way += 1
        future = self.build(made)
        future.add_done_callback(self._ended)
        return future

    def _ended(self, _: Future[Any]) -> None:
        with self._lock:
            self._under_way -= 1
            if not self._under_way:
                self.busy += time.monotonic() - self._since

    def account(self, built: Iterable[Any]) -> str:
        """How many kernels the builds have, and at which rate those that were new were compiled;
        empty where builds are not made of kernels.
        """
        kernels = {c.path: c for b in built for c in getattr(b, "cubins", ())}
        fresh = sum(not c.reused for c in kernels.values())
        with self._lock:
            running = time.monotonic() - self._since if self._under_way else 0.0
            busy = self.busy + running
        if not kernels:
            return ""
        if not fresh or busy <= 0:
            return f"{len(kernels)} kernels, all of them built before"
        known = f", {len(kernels) - fresh} built before" if fresh < len(kernels) else ""
        rate = fresh / busy
        return f"{fresh} kernels compiled in {busy:.1f} s, {rate:.1f} a second{known}"
