"""The tuner's handle on its worker: start, ask with a time limit, notice death, start again.

Gives `Supervisor.ask`, which returns the worker's answer or raises `Fallen` with a status (crash,
hang, refused) and the reason in words: the signal's name or exit code, with the end of what the
candidate printed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from json import JSONDecodeError, dumps, loads
from multiprocessing import Pipe
from typing import Any

from obelisk.base.errors import InternalError
from obelisk.base.log import logger
from obelisk.tune.types import Status

_START_SECONDS = 60.0
_END_SECONDS = 20.0  # a driver may keep a killed process until its kernels are torn down
_PROLOGUE = (
    "import os,sys;"
    "[os.environ.__setitem__(v,sys.argv[3]) for v in"
    " ('OMP_NUM_THREADS','OPENBLAS_NUM_THREADS','MKL_NUM_THREADS')];"
    "[os.environ.pop(v,None) for v in ('OPENBLAS_CORETYPE','OPENBLAS_L2_SIZE')];"
    "from importlib import import_module;"
    "import_module(sys.argv[4]).main(int(sys.argv[1]),int(sys.argv[2]),sys.argv[5:])"
)


class Fallen(Exception):
    """A candidate failed.

    Its status and why. The worker is gone unless the status is REFUSED or UNLOADABLE.
    """

    def __init__(self, status: Status, detail: str) -> None:
        super().__init__(detail)
        self.status, self.detail = status, detail


class Supervisor:
    """One worker at a time. `hello` is what a fresh worker is told; descriptors in it are
    inherited; `worker` is the module whose `main` serves.

    `generation` counts the workers, so that callers know what a fresh one must be told again.
    """

    def __init__(
        self,
        hello: dict[str, Any],
        descriptors: tuple[int, ...],
        worker: str = "obelisk.tune.worker",
    ) -> None:
        self._hello, self._descriptors, self._worker = hello, descriptors, worker
        self._process: subprocess.Popen[bytes] | None = None
        self.generation = 0

    @property
    def running(self) -> bool:
        """Whether a worker is up (one that died unnoticed counts)."""
        return self._process is not None

    def start(self) -> None:
        """Make sure a worker is up."""
        if self._process is not None:
            return
        ours, theirs = Pipe()
        life_read, self._life = os.pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by stop())
        self._pipe = ours
        argv = [sys.executable, "-c", _PROLOGUE, str(theirs.fileno()), str(life_read)]
        self._process = subprocess.Popen(
            [*argv, str(self._hello["threads"]), self._worker, *(p for p in sys.path if p)],
            pass_fds=(theirs.fileno(), life_read, *self._descriptors),
            stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C at the terminal is the tuner's to handle
        )  # fmt: skip
        theirs.close()
        os.close(life_read)
        self.generation += 1
        try:
            self._exchange(self._hello, _START_SECONDS)
        except Fallen as e:
            raise InternalError(f"the tuning worker did not start: {e.detail}") from e

    def ask(self, limit: float, do: str, **arguments: Any) -> dict[str, Any]:
        """Send one command and wait `limit` seconds for its answer; raises `Fallen`."""
        self.start()
        answer = self._exchange({"do": do, **arguments}, limit)
        if "refused" in answer:
            raise Fallen(Status.REFUSED, answer["refused"])
        return answer

    def _exchange(self, message: dict[str, Any], limit: float) -> dict[str, Any]:
        try:
            self._pipe.send_bytes(dumps(message).encode())
            if not self._pipe.poll(limit):
                self.stop()
                raise Fallen(Status.HANG, f"no answer within {limit:.3g} s; the process was killed")
            raw = self._pipe.recv_bytes()
            answer = loads(raw)
        except (EOFError, ConnectionError) as e:
            raise Fallen(Status.CRASH, self._obituary()) from e
        except (JSONDecodeError, UnicodeDecodeError, OSError, MemoryError) as e:
            self.stop()
            raise Fallen(Status.CRASH, f"it corrupted the worker's answers ({e})") from e
        if not isinstance(answer, dict):
            self.stop()
            raise Fallen(Status.CRASH, "it corrupted the worker's answers")
        return answer

    def _obituary(self) -> str:
        assert self._process is not None
        try:
            code = self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self.stop()
            return "its process closed the pipe and did not end; it was killed"
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - 400))
        said = self._log.read().decode(errors="replace").strip()
        self.stop()
        if code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            text = f"its process was ended by {name}"
        else:
            text = f"its process exited with code {code}"
        return f"{text}: {said.splitlines()[-1]}" if said else text

    def stop(self) -> None:
        """End the worker, if any, and release its pipes."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            logger("tune").warning("worker %d was killed and has not ended yet", process.pid)
        self._pipe.close()
        os.close(self._life)
        self._log.close()
