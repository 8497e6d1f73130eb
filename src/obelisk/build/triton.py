"""Triton kernels to cubins for an exact architecture, with or without a GPU at hand.

Takes kernels as text; gives the path of a cubin in a directory whose name is the digest of all that
went in, and what a launch needs. The compiler runs in child processes with a time limit per
kernel and a kept log. Torch is not needed, neither here nor to launch (`launchable`).
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from obelisk.base.digest import digest
from obelisk.base.errors import BuildFailed, InternalError, MissingDependency
from obelisk.base.settings import settings, usable_cores
from obelisk.build.compiler import work_folder
from obelisk.build.cuda import REASON_CHARS, Resources
from obelisk.ir.dtype import DType
from obelisk.lower.cuda.options import CudaKernel, CudaLaunch, CudaModule, Place, Pointer
from obelisk.lower.triton import TritonKernel, TritonModule
from obelisk.machine.description import Machine

CHILD = Path(__file__).with_name("triton_child.py")
MARK = "obelisk:"
EARLY_CAPABILITY = 90  # from which on a launch may begin before the one ahead has ended
START_SECONDS = 60.0  # until a child has imported the compiler
_ELEMENT = {
    DType.F64: "fp64", DType.F32: "fp32", DType.F16: "fp16", DType.BF16: "bf16",
    DType.F8E4M3: "u8", DType.I32: "i32", DType.I8: "i8", DType.BOOL: "u8",
}  # fmt: skip
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


@dataclass(frozen=True, slots=True)
class TritonCubin:
    """A finished build.

    Attributes:
        path: the cubin.
        seconds: the build took (0 when it was there).
        shared: bytes of dynamic shared memory of a launch.
        threads: of a block.
        resources: registers and stack of a thread (zeros where no tool reads them).
        reused: whether it was there.
    """

    path: Path
    seconds: float
    shared: int
    threads: int
    resources: Resources
    reused: bool


def version() -> str:
    """Triton's version; raises `MissingDependency` where it is not installed."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        raise MissingDependency(
            "Triton is not installed: install the extra obelisk[triton]"
        ) from None


def _capability(machine: Machine) -> int:
    if machine.capability is None:
        raise BuildFailed(f"{machine.name} is no CUDA device: Triton cannot compile for it")
    major, minor = machine.capability
    return 10 * major + minor


def _facts(home: Path, seconds: float, reused: bool) -> TritonCubin:
    """A build from its folder; raises where the folder is not whole."""
    facts = json.loads((home / "facts.json").read_text(encoding="utf-8"))
    resources = Resources(**facts.pop("resources"))
    if not (home / "kernel.cubin").is_file():
        raise FileNotFoundError(home / "kernel.cubin")
    return TritonCubin(home / "kernel.cubin", seconds, resources=resources, reused=reused, **facts)


@dataclass(slots=True)
class _Job:
    """One kernel on its way to a cubin."""

    kernel: TritonKernel
    key: str
    home: Path
    work: Path
    description: dict[str, Any]


class _Builds:
    """Compiles kernels for one machine into one directory."""

    def __init__(self, machine: Machine, timeout: float, root: Path) -> None:
        self.machine, self.timeout, self.root = machine, timeout, root
        self.capability, self.version = _capability(machine), version()

    def key(self, kernel: TritonKernel) -> str:
        return digest(
            "triton", kernel.source, kernel.entry, repr(kernel.pointers), repr(kernel.aligned),
            str(kernel.warps), str(kernel.stages), str(self.capability), self.version,
            str(self.machine.shared_bytes),
        )  # fmt: skip

    def found(self, kernel: TritonKernel) -> TritonCubin | None:
        """An earlier build of the same kernel."""
        key = self.key(kernel)
        with contextlib.suppress(ValueError, TypeError, KeyError, OSError):
            return _facts(self.root / key[:2] / key, 0.0, True)
        return None

    def job(self, kernel: TritonKernel) -> _Job:
        """A folder with the text, and what the child needs to know."""
        key = self.key(kernel)
        home = self.root / key[:2] / key
        work = work_folder(home, "kernel.py", kernel.source)
        description = {
            "folder": str(work), "entry": kernel.entry,
            "pointers": [_ELEMENT[d] for d in kernel.pointers], "aligned": list(kernel.aligned),
            "early": self.capability >= EARLY_CAPABILITY, "capability": self.capability,
            "warps": kernel.warps, "stages": kernel.stages,
            "shared_limit": self.machine.shared_bytes,
        }  # fmt: skip
        return _Job(kernel, key, home, work, description)

    def finish(self, job: _Job, answer: dict[str, Any], seconds: float) -> TritonCubin:
        """Move a build to its place; raises `BuildFailed` where there is none."""
        if "error" in answer:
            raise self.failed(job, answer["error"], answer["log"])
        if answer["shared"] > self.machine.shared_bytes:
            reason = (
                f"a block needs {answer['shared']} bytes of shared memory, {self.machine.name} has "
                f"{self.machine.shared_bytes}: a larger grid or loop makes tiles smaller"
            )
            raise self.failed(job, reason, "")
        if answer["scratch"]:
            reason = f"the compiler asks for {answer['scratch']} bytes of its own device memory"
            raise self.failed(job, reason, "")
        usage = _USAGE.search(answer["usage"])
        registers, stack, _, local = map(int, usage.groups()) if usage else (0, 0, 0, 0)
        facts = {
            "shared": answer["shared"],
            "threads": 32 * answer["warps"],
            "resources": asdict(Resources(registers, stack, local, local, 0)),
        }
        (job.work / "build.log").write_text(answer["usage"], encoding="utf-8")
        (job.work / "facts.json").write_text(json.dumps(facts), encoding="utf-8")
        os.chmod(job.work, 0o755)
        try:
            os.rename(job.work, job.home)
        except OSError:
            if self.found(job.kernel) is None:  # not merely that another was first
                shutil.rmtree(job.home, ignore_errors=True)
                os.rename(job.work, job.home)
        return _facts(job.home, seconds, False)

    def failed(self, job: _Job, reason: str, log: str) -> BuildFailed:
        """The error of a failed build, its log kept."""
        kept = job.home.parent / f"{job.key}.failed.log"
        kept.write_text(f"{reason}\n{log}\n{job.kernel.source}", encoding="utf-8")
        return BuildFailed(" ".join(reason.split())[:REASON_CHARS], str(kept))

    def run(self, jobs: Sequence[_Job]) -> list[TritonCubin | BuildFailed]:
        """Compile jobs one after the other, in as many children as it takes."""
        left, out = deque(jobs), list[TritonCubin | BuildFailed]()
        while left:
            with tempfile.TemporaryDirectory(prefix="obelisk-triton-") as folder:
                errors = Path(folder) / "stderr"
                with errors.open("w+b") as stream:
                    child = _Child([j.description for j in left], folder, stream)
                    try:
                        self.follow(child, left, out, errors)
                    finally:
                        child.end()
        return out

    def follow(
        self, child: _Child, left: deque[_Job], out: list[TritonCubin | BuildFailed], errors: Path
    ) -> None:
        """Take a child's answers until it ends; whatever it was at when it fails is to blame."""
        ready = False
        while left:
            begin = time.monotonic()
            log, ended = "", True
            try:
                if not ready:  # its first line says that it has imported the compiler
                    ready = child.answer(START_SECONDS) is not None
                answer = child.answer(self.timeout)
                ended = answer is None
                reason = f"Triton's compiler ended with {child.end()}" if ended else ""
                log = errors.read_text(encoding="utf-8", errors="replace") if ended else ""
            except TimeoutError:
                answer, reason = None, f"Triton exceeded its {self.timeout:g} s"
            job = left.popleft()
            try:
                taken = answer or {"error": reason, "log": log}
                out.append(self.finish(job, taken, time.monotonic() - begin))
            except BuildFailed as failed:
                out.append(failed)
            finally:
                shutil.rmtree(job.work, ignore_errors=True)
            if ended:
                return


class _Child:
    """A process that compiles."""

    def __init__(self, jobs: list[dict[str, Any]], folder: str, errors: Any) -> None:
        env = {**os.environ, "TRITON_CACHE_DIR": str(Path(folder) / "cache")}
        env.pop("TRITON_INTERPRET", None)
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(CHILD)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=errors, text=True, start_new_session=True, env=env,
        )  # fmt: skip
        self.lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died already: its end says so
            self.process.stdin.write(json.dumps(jobs))
            self.process.stdin.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def answer(self, wait: float) -> dict[str, Any] | None:
        """The next answer; None where the process ended. Raises `TimeoutError`."""
        end = time.monotonic() + wait
        while True:
            try:
                line = self.lines.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                raise TimeoutError from None
            if line is None:
                return None
            if line.startswith(MARK):
                found: dict[str, Any] = json.loads(line.removeprefix(MARK))
                return found

    def end(self) -> str:
        """Kill what is left of it; how it ended."""
        code = self.process.poll()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        waited = self.process.wait()
        code = waited if code is None else code
        return f"signal {-code}" if code < 0 else f"exit code {code}"


def compile_triton_many(
    kernels: Sequence[TritonKernel],
    machine: Machine,
    *,
    workers: int | None = None,
    timeout: float = 120.0,
    directory: Path | None = None,
) -> list[TritonCubin | BuildFailed]:
    """Compile kernels for `machine`'s architecture in parallel; one answer per kernel, in order.

    Equal kernels are compiled once; what was compiled before is found again. A kernel that fails,
    or takes more than `timeout` seconds, gives its `BuildFailed` and ends nothing. Raises
    `MissingDependency` where Triton is not installed.
    """
    builds = _Builds(machine, timeout, directory or settings().cache_dir / "build")
    unique = list(dict.fromkeys(kernels))
    answers: dict[TritonKernel, TritonCubin | BuildFailed] = {}
    todo: list[TritonKernel] = []
    for kernel in unique:
        there = builds.found(kernel)
        if there is None:
            todo.append(kernel)
        else:
            answers[kernel] = there
    if todo:
        count = min(len(todo), max(1, workers or usable_cores()))
        shares = [todo[i::count] for i in range(count)]
        with ThreadPoolExecutor(count) as pool:
            done = pool.map(lambda share: builds.run([builds.job(k) for k in share]), shares)
            for share, results in zip(shares, done, strict=True):
                answers.update(zip(share, results, strict=True))
    return [answers[k] for k in kernels]


def launchable(module: TritonModule, built: Sequence[TritonCubin]) -> CudaModule:
    """The module as the CUDA launcher (`build.device.CudaLibrary`) takes it, `built` being the
    cubins of its kernels in order.

    The compiler adds two pointers to every kernel's arguments, memory of its own that these kernels
    do not use.
    """
    if len(built) != len(module.kernels):
        raise InternalError(f"{len(built)} cubins for {len(module.kernels)} kernels")
    kernels = tuple(
        CudaKernel(k.entry, k.source, k.blocks, b.threads, b.shared, 1, k.notes)
        for k, b in zip(module.kernels, built, strict=True)
    )
    unused = (Pointer(Place.SCRATCH, 0, 0),) * 2
    launches = tuple(CudaLaunch(x.kernel, x.arguments + unused, x.origin) for x in module.launches)
    return CudaModule(
        kernels, launches, module.scratch_bytes, 0, digest("launchable", module.digest),
        module.notes,
    )  # fmt: skip
