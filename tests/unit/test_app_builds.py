"""The account of builds: kernels once, time with anything under way, nothing of other builds."""

from __future__ import annotations

import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from obelisk.app.backends import Lowering
from obelisk.app.builds import Builds


def built(*cubins: tuple[str, bool]) -> Any:
    """A build of some kernels; True: it was there."""
    return SimpleNamespace(cubins=[SimpleNamespace(path=Path(p), reused=r) for p, r in cubins])


def test_kernels_count_once_and_pauses_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two builds that overlap, a pause, one more: four seconds; a shared kernel is one."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    futures: list[Future[Any]] = [Future() for _ in range(3)]
    left = iter(futures)
    builds = Builds(lambda made: next(left))
    made: Any = SimpleNamespace(spec=Lowering)
    builds(made)
    now = 101.0
    builds(made)
    futures[0].set_result(None)
    now = 103.0
    futures[1].cancel()
    futures[1].set_running_or_notify_cancel()
    now = 150.0
    builds(made)
    now = 151.0
    futures[2].set_exception(ValueError("no"))
    assert builds.busy == 4.0
    one, two = built(("a", False), ("b", False)), built(("b", False), ("c", True))
    assert builds.account([one, two]) == "2 kernels compiled in 4.0 s, 0.5 a second, 1 built before"
    assert builds.account([built(("c", True))]) == "1 kernels, all of them built before"
    assert builds.account([SimpleNamespace(path="x.so")]) == ""
