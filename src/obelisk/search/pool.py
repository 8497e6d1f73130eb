"""Where units run: in this process, or in worker processes that may die.

An `Executor` takes tasks and gives outcomes in any order; the driver merges them in its own. A
worker is a fresh interpreter (no fork, no re-run of the caller's main module) that reads tasks from
a pipe. When one dies, the unit that it was at is run once more elsewhere, then given up and
counted; what merely waited there is not lost. A worker that loses its parent ends.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from obelisk.base.errors import InternalError
from obelisk.base.log import logger
from obelisk.ir import Graph
from obelisk.search.units import Bench, Context, Limits, Outcome, Task

PATIENCE = 0.7  # seconds of work after which workers are worth their start (about 0.4 s each)
AHEAD = 2  # tasks a worker has at once, so that it need not wait for an answer
START_SECONDS = 120.0
_PROLOGUE = (
    "import os,sys;"
    "[os.environ.__setitem__(v,'1') for v in"
    " ('OMP_NUM_THREADS','OPENBLAS_NUM_THREADS','MKL_NUM_THREADS')];"
    "sys.path[:]=sys.argv[2:];"
    "from obelisk.search.pool import serve;"
    "serve(int(sys.argv[1]))"
)


class Executor(Protocol):
    """Runs units somewhere.

    Attributes:
        retried: units run again after their worker died.
        dropped: units given up.
        workers: processes in use beside this one.
        peak: most resident bytes of any worker.
    """

    retried: int
    dropped: int
    workers: int
    peak: int

    def submit(self, task: Task) -> None:
        """Queue a unit."""

    def results(self, timeout: float) -> list[Outcome]:
        """Outcomes since the last call, waiting up to `timeout` seconds for the first; a unit that
        was given up is an outcome marked "dropped".
        """

    def live_states(self) -> int:
        """States of the unit at work in this process, for progress."""

    def close(self) -> None:
        """End all workers; queued and running units are forgotten."""


class Local:
    """One unit after the other in this process."""

    def __init__(
        self,
        context: Context,
        graph: Graph,
        limits: Callable[[], Limits],
        tick: Callable[[], str],
    ) -> None:
        self.retried = self.dropped = self.workers = self.peak = 0
        self._bench = Bench(context, graph, tick)
        self._limits = limits
        self._tasks: deque[Task] = deque()

    def submit(self, task: Task) -> None:
        """Queue a unit."""
        self._tasks.append(task)

    def results(self, timeout: float) -> list[Outcome]:
        """Do the next unit."""
        if not self._tasks:
            return []
        return [self._bench.run(self._tasks.popleft(), self._limits())]

    def live_states(self) -> int:
        """States of the unit at work."""
        return self._bench.counts.states

    def close(self) -> None:
        """Forget what is queued."""
        self._tasks.clear()


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    pipe: Connection
    ready: bool = False
    tasks: deque[Task] = field(default_factory=deque)


class Pool:
    """Worker processes of this machine.

    Until the first worker is up, units run here; workers are started only once `patience` seconds
    have passed, so that a small search does not pay for them.
    """

    def __init__(
        self,
        context: Context,
        graph: Graph,
        limits: Callable[[], Limits],
        tick: Callable[[], str],
        workers: int,
        patience: float = PATIENCE,
    ) -> None:
        self.retried = self.dropped = self.workers = self.peak = 0
        self._context, self._limits, self._wanted = context, limits, workers
        self._begun, self._patience = time.monotonic(), patience
        self._help = patience > 0
        self._bench = Bench(context, graph, tick)
        self._tasks: deque[Task] = deque()
        self._again: set[str] = set()
        self._workers: list[_Worker] = []
        self._starts = 2 * workers + 8  # a machine on which workers keep dying gets no more

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that are up."""
        return [w.process.pid for w in self._workers if w.ready]

    def submit(self, task: Task) -> None:
        """Queue a unit."""
        self._tasks.append(task)

    def live_states(self) -> int:
        """States of the unit at work in this process."""
        return self._bench.counts.states

    def start(self) -> None:
        """Start the workers that are wanted and not there."""
        while len(self._workers) < self._wanted and self._starts > 0:
            self._start()

    def results(self, timeout: float) -> list[Outcome]:
        """Outcomes of the workers, or of one unit done here while none is up."""
        waited = time.monotonic() - self._begun >= self._patience
        if self._tasks and waited:
            self.start()
        self._dispatch()
        nobody = not any(w.ready for w in self._workers)
        helps = self._help or not self._workers
        out = self._gather(0.0 if nobody and helps else timeout)
        self._dispatch()
        if not out and nobody and helps and self._tasks:
            out.append(self._bench.run(self._tasks.popleft(), self._limits()))
        return out

    def close(self) -> None:
        """End all workers at once."""
        self._tasks.clear()
        for w in self._workers:
            w.process.kill()
        for w in self._workers:
            w.pipe.close()
            w.process.wait()
        self._workers.clear()

    # -- workers ---------------------------------------------------------------------------------
    def _start(self) -> None:
        ours, theirs = Pipe()
        argv = [sys.executable, "-c", _PROLOGUE, str(theirs.fileno()), *(p for p in sys.path if p)]
        process = subprocess.Popen(
            argv,
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C at the terminal is the parent's to handle
        )
        theirs.close()
        self._starts -= 1
        worker = _Worker(process, ours)
        self._workers.append(worker)
        self.workers = max(self.workers, len(self._workers))
        try:
            ours.send(self._context)
        except OSError:
            self._bury(worker)

    def _dispatch(self) -> None:
        """Give tasks to the workers with the fewest."""
        for depth in range(AHEAD):
            if depth and len(self._tasks) <= len(self._workers):
                return  # near the end a task that waits behind another could run elsewhere
            for w in list(self._workers):
                if w.ready and len(w.tasks) == depth and self._tasks:
                    task = self._tasks.popleft()
                    w.tasks.append(task)
                    try:
                        w.pipe.send((task, self._limits()))
                    except OSError:
                        self._bury(w)

    def _gather(self, timeout: float) -> list[Outcome]:
        out: list[Outcome] = []
        pipes: dict[Any, _Worker] = {w.pipe: w for w in self._workers}
        for pipe in wait(list(pipes), timeout) if pipes else ():
            worker = pipes[pipe]
            try:
                message = worker.pipe.recv()
            except (EOFError, OSError):
                out += self._bury(worker)
                continue
            match message:
                case "ready":
                    worker.ready = True
                case Outcome():
                    worker.tasks.popleft()
                    self.peak = max(self.peak, message.memory)
                    out.append(message)
                case _:
                    raise InternalError(f"a unit of the search failed in its worker:\n{message}")
        return out

    def _bury(self, worker: _Worker) -> list[Outcome]:
        """A worker died: what it was at is tried once more, what waited there just goes back."""
        if worker not in self._workers:
            return []
        self._workers.remove(worker)
        worker.pipe.close()
        worker.process.kill()
        code = worker.process.wait()
        given_up: list[Outcome] = []
        waiting = list(worker.tasks)
        if waiting:
            first = waiting[0]
            logger(__name__).warning("a search worker died (exit %d) at unit %s", code, first.key)
            if first.key in self._again:
                self.dropped += 1
                waiting.pop(0)
                given_up.append(Outcome(first.key, stopped="dropped"))
            else:
                self.retried += 1
                self._again.add(first.key)
        self._tasks.extendleft(reversed(waiting))
        return given_up


def serve(fd: int) -> None:
    """A worker: read the context, then tasks with their limits, and answer each.

    Ends when the pipe closes; in the middle of a unit, when the parent is gone.
    """
    parent = os.getppid()
    pipe = Connection(fd)
    with contextlib.suppress(EOFError, OSError):
        context: Context = pipe.recv()
        bench = Bench.from_text(context, lambda: "" if os.getppid() == parent else "orphaned")
        pipe.send("ready")
        while True:
            task, limits = pipe.recv()
            try:
                answer: object = bench.run(task, limits)
            except Exception:
                answer = traceback.format_exc()
            pipe.send(answer)
