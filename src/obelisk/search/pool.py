"""Where units run: in this process, or in worker processes that may die.

An `Executor` takes tasks and gives outcomes in any order; the driver merges them in its own. A
worker reads tasks from a pipe. Where this process has one thread it is a fork of it, there in
milliseconds; where others run (a fork would inherit their locks, held for ever) it is a fresh
interpreter, which takes some tenths of a second. When one dies, the unit that it was at is run once
more elsewhere, then given up and counted; what merely waited there is not lost. A worker that loses
its parent ends.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
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

PATIENCE = 0.7  # seconds of work after which fresh interpreters are worth their start (0.4 s each)
AHEAD = 2  # tasks a worker has at once where they are short, so that it need not wait for the next
SHORT_SECONDS = 0.02  # longer ones had better wait where any worker can take them
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


def can_fork() -> bool:
    """Whether a fork of this process can do no harm: it has no thread but this one."""
    return hasattr(os, "fork") and threading.active_count() == 1


class _Fork:
    """A forked child, with as much of `subprocess.Popen` as is needed here."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def kill(self) -> None:
        """End it at once, if it is still there."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Wait for its end; the exit code, negative for a signal."""
        if self.returncode is None:
            try:
                _, status = os.waitpid(self.pid, 0)
                self.returncode = os.waitstatus_to_exitcode(status)
            except ChildProcessError:  # somebody else waited for it
                self.returncode = -signal.SIGKILL
        return self.returncode


@dataclass
class _Worker:
    process: subprocess.Popen[bytes] | _Fork
    pipe: Connection
    ready: bool = False
    tasks: deque[Task] = field(default_factory=deque)


def _later(queued: Task, task: Task) -> bool:
    """Whether a queued synthesis of the same interval may wait until after `task`."""
    same = (queued.start, queued.stop) == (task.start, task.stop)
    return same and queued.skeleton is None and queued.split is not None


class Pool:
    """Worker processes of this machine.

    Forks are started with the first units. Where fresh interpreters are needed, units run here
    until the first is up, and they are started only once `patience` seconds have passed, so that a
    small search does not pay for them.
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
        self._graph, self._forks = graph, can_fork()
        self._begun, self._patience = time.monotonic(), 0.0 if self._forks else patience
        self._help = self._patience > 0
        self._bench = Bench(context, graph, tick)
        self._tasks: deque[Task] = deque()
        self._again: set[str] = set()
        self._workers: list[_Worker] = []
        self._starts = 2 * workers + 8  # a machine on which workers keep dying gets no more
        self._typical = SHORT_SECONDS  # seconds of a unit lately

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that are up."""
        return [w.process.pid for w in self._workers if w.ready]

    def submit(self, task: Task) -> None:
        """Queue a unit; of an interval's syntheses those without a split axis come first, as they
        take longest.
        """
        at = len(self._tasks)
        if task.skeleton is None and task.split is None:
            while at > 0 and _later(self._tasks[at - 1], task):
                at -= 1
        self._tasks.insert(at, task)

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
        self._starts -= 1
        if self._forks:
            self._workers.append(_Worker(self._fork(ours, theirs), ours))
            self.workers = max(self.workers, len(self._workers))
            theirs.close()
            return
        argv = [sys.executable, "-c", _PROLOGUE, str(theirs.fileno()), *(p for p in sys.path if p)]
        process = subprocess.Popen(
            argv,
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C at the terminal is the parent's to handle
        )
        theirs.close()
        worker = _Worker(process, ours)
        self._workers.append(worker)
        self.workers = max(self.workers, len(self._workers))
        try:
            ours.send(self._context)
        except OSError:
            self._bury(worker)

    def _fork(self, ours: Connection, theirs: Connection) -> _Fork:
        """A child that serves the other end of a pipe; it has the program already."""
        parent = os.getpid()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # idle threads of a library
            pid = os.fork()
        if pid:
            return _Fork(pid)
        code = 1
        try:
            os.setsid()  # a Ctrl-C at the terminal is the parent's to handle
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            for pipe in (ours, *(w.pipe for w in self._workers)):
                pipe.close()  # or the others would not see their parent's end of them close
            gc.freeze()  # what was there stays shared
            bench = Bench(self._context, self._graph, orphan_of(parent))
            answer_tasks(theirs, bench)
            code = 0
        except Exception:  # said where a fresh interpreter would say it; the parent counts a death
            traceback.print_exc()
        finally:
            os._exit(code)

    def _dispatch(self) -> None:
        """Give tasks to the workers with the fewest."""
        for depth in range(AHEAD if self._typical < SHORT_SECONDS else 1):
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
                    self._typical += 0.2 * (message.seconds - self._typical)
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


def orphan_of(parent: int) -> Callable[[], str]:
    """A `tick` that stops a unit once the parent is gone."""
    return lambda: "" if os.getppid() == parent else "orphaned"


def answer_tasks(pipe: Connection, bench: Bench) -> None:
    """Say that the bench is ready, then answer tasks until the pipe closes."""
    with contextlib.suppress(EOFError, OSError):
        pipe.send("ready")
        while True:
            task, limits = pipe.recv()
            try:
                answer: object = bench.run(task, limits)
            except Exception:
                answer = traceback.format_exc()
            pipe.send(answer)


def serve(fd: int) -> None:
    """A fresh interpreter as a worker: read the context, then tasks with their limits, and answer
    each.

    Ends when the pipe closes; in the middle of a unit, when the parent is gone.
    """
    tick = orphan_of(os.getppid())
    pipe = Connection(fd)
    with contextlib.suppress(EOFError, OSError):
        context: Context = pipe.recv()
        answer_tasks(pipe, Bench.from_text(context, tick))
