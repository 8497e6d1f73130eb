"""Ctrl-C that is not lost.

Python raises `KeyboardInterrupt` between any two instructions, those of destructors and of weak
references' callbacks among them; there it is printed and dropped, and work goes on. Interned nodes
are weakly held, so that a search spends a part of its time in such callbacks.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Self


class Interrupts:
    """Counts SIGINTs while it is entered; each still does what it did before.

    Long work asks `count` where it asks for its other limits. Outside the main thread, and where
    SIGINT is ignored or handled by the system, nothing is counted.
    """

    def __init__(self) -> None:
        self.count = 0
        self._before: Any = None

    def __enter__(self) -> Self:
        before = signal.getsignal(signal.SIGINT)
        if callable(before) and threading.current_thread() is threading.main_thread():
            self._before = before
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None and signal.getsignal(signal.SIGINT) == self._note:
            signal.signal(signal.SIGINT, self._before)
        self._before = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self._before is not None:
            self._before(number, frame)
