"""CUDA C++ to cubins for an exact architecture, with or without a GPU at hand.

Takes source text; gives the path of a cubin in a directory whose name is the digest of everything
that went in, and what the compiler says of registers, spills and shared memory. NVRTC runs in
process (threads compile in parallel), a megakernel's long text in a child process of its own, which
may die; where its wheel is missing, `nvcc` in child processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from obelisk.base.digest import digest
from obelisk.base.errors import BuildFailed, MissingDependency
from obelisk.base.settings import settings, usable_cores
from obelisk.build.compiler import work_folder

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120")
REASON_CHARS = 300
LARGE = 64_000  # characters of a text (a megakernel's) that NVRTC compiles in a child process
VERSION_SECONDS = 20.0
_REGISTERS = re.compile(r"Used (\d+) registers")
_SPILL = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_SHARED = re.compile(r"(\d+)(?:\+\d+)? bytes smem")


@dataclass(frozen=True, slots=True)
class Resources:
    """What a kernel uses, from the compiler's log: registers a thread, bytes of stack, of spill
    stores and loads a thread, bytes of static shared memory.
    """

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int


@dataclass(frozen=True, slots=True)
class Cubin:
    """A finished build: the file, seconds it took (0 when it was there), resources, and whether it
    was there.
    """

    path: Path
    seconds: float
    resources: Resources
    reused: bool


@lru_cache(maxsize=1)
def toolchain() -> str:
    """Which compiler makes cubins: `nvrtc MAJOR.MINOR`, or the path and version of nvcc.

    Raises `MissingDependency` where there is neither.
    """
    try:
        from cuda.bindings import nvrtc

        error, major, minor = nvrtc.nvrtcVersion()
        if int(error) == 0:
            return f"nvrtc {major}.{minor}"
    except Exception:  # no wheel, or a wheel without its library: both mean "not here"
        pass
    path = shutil.which("nvcc")
    if path is None:
        raise MissingDependency(
            "no CUDA compiler: install the extra obelisk[cuda] (NVRTC), or put nvcc on the PATH"
        )
    answer = subprocess.run(
        [path, "--version"], capture_output=True, text=True, timeout=VERSION_SECONDS, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if answer.returncode != 0:
        raise MissingDependency(f"{path} does not answer --version (exit {answer.returncode})")
    return f"{path} {answer.stdout.strip().splitlines()[-1]}"


def parse_resources(log: str) -> Resources:
    """Resources from the log of `ptxas -v`, the largest of each where several functions are named.

    Raises `BuildFailed` where the log does not name registers.
    """
    registers = [int(m) for m in _REGISTERS.findall(log)]
    if not registers:
        raise BuildFailed("the compiler's log names no registers; its format is not known")
    spills = [tuple(map(int, m)) for m in _SPILL.findall(log)] or [(0, 0, 0)]
    shared = [int(m) for m in _SHARED.findall(log)] or [0]
    stack, stores, loads = (max(s[i] for s in spills) for i in range(3))
    return Resources(max(registers), stack, stores, loads, max(shared))


def _nvrtc(source: str, arch: str) -> tuple[bytes, str]:
    """Compile in process. Returns cubin and log; raises `BuildFailed` with the first error."""
    from cuda.bindings import nvrtc

    def check(answer: tuple[Any, ...], what: str) -> tuple[Any, ...]:
        if int(answer[0]) != 0:
            raise BuildFailed(f"NVRTC: {what} failed with code {answer[0]}")
        return answer[1:]

    (program,) = check(
        nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], []), "creating a program"
    )
    try:
        options = [
            f"--gpu-architecture={arch}".encode(), b"--std=c++17", b"--ptxas-options=-v",
            b"--extra-device-vectorization", b"--no-cache",
        ]  # fmt: skip
        code = nvrtc.nvrtcCompileProgram(program, len(options), options)[0]
        (size,) = check(nvrtc.nvrtcGetProgramLogSize(program), "reading the log")
        log = b" " * int(size)
        check(nvrtc.nvrtcGetProgramLog(program, log), "reading the log")
        text = log.decode(errors="replace").rstrip("\0 ")
        if int(code) != 0:
            raise BuildFailed(_reason(text, f"NVRTC ended with {code}"), text)
        (size,) = check(nvrtc.nvrtcGetCUBINSize(program), "reading the cubin")
        cubin = b" " * int(size)
        check(nvrtc.nvrtcGetCUBIN(program, cubin), "reading the cubin")
        return cubin, text
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _run(command: list[str], timeout: float, who: str) -> subprocess.CompletedProcess[str]:
    """Run a compiler; raises `BuildFailed` where it takes more than `timeout` seconds."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=timeout,
            check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired as late:
        raise BuildFailed(f"{who} exceeded its {timeout:g} s") from late


def _nvrtc_apart(source: str, arch: str, timeout: float) -> tuple[bytes, str]:
    """As `_nvrtc`, in a child process: its assembler can die of a text, or take very long."""
    with tempfile.TemporaryDirectory(prefix="obelisk-") as folder:
        text, out, log = (Path(folder) / f"kernel.{end}" for end in ("cu", "cubin", "log"))
        text.write_text(source, encoding="utf-8")
        command = [sys.executable, "-m", __name__, arch, folder]
        done = _run(command, timeout, "NVRTC")
        said = log.read_text(encoding="utf-8") if log.is_file() else done.stderr
        if done.returncode < 0:
            raise BuildFailed(f"NVRTC was ended by signal {-done.returncode}", said)
        if done.returncode != 0:
            otherwise = done.stderr.strip()[-REASON_CHARS:] or f"exit code {done.returncode}"
            raise BuildFailed(_reason(said, otherwise), said)
        return out.read_bytes(), said


def _child(arch: str, folder: str) -> int:
    """What the child process of `_nvrtc_apart` does: kernel.cu to kernel.cubin and kernel.log."""
    home = Path(folder)
    try:
        cubin, log = _nvrtc((home / "kernel.cu").read_text(encoding="utf-8"), arch)
    except BuildFailed as failed:
        (home / "kernel.log").write_text(failed.log, encoding="utf-8")
        sys.stderr.write(failed.reason)
        return 1
    (home / "kernel.log").write_text(log, encoding="utf-8")
    (home / "kernel.cubin").write_bytes(cubin)
    return 0


def _nvcc(path: str, source: str, arch: str, timeout: float) -> tuple[bytes, str]:
    """Compile in a child process. Returns cubin and log."""
    with tempfile.TemporaryDirectory(prefix="obelisk-") as folder:
        text, out = Path(folder) / "kernel.cu", Path(folder) / "kernel.cubin"
        text.write_text(source, encoding="utf-8")
        number = arch.removeprefix("sm_")
        command = [
            path, "-cubin", "-std=c++17", "-Xptxas", "-v",
            f"-gencode=arch=compute_{number},code={arch}", "-o", str(out), str(text),
        ]  # fmt: skip
        done = _run(command, timeout, "nvcc")
        log = done.stdout + done.stderr
        if done.returncode != 0 or not out.is_file():
            raise BuildFailed(_reason(log, f"nvcc ended with exit code {done.returncode}"), log)
        return out.read_bytes(), log


def _reason(log: str, otherwise: str) -> str:
    for line in log.splitlines():
        if "error" in line.lower():
            return line.strip()[:REASON_CHARS]
    return otherwise


def compile_cuda(
    source: str, arch: str, *, timeout: float = 120.0, directory: Path | None = None
) -> Cubin:
    """Compile one translation unit for `arch` (`sm_90a`, ...), or find the cubin of the same text,
    architecture and compiler.

    `timeout` (seconds) bounds nvcc. NVRTC runs in process, or for a text of more than `LARGE`
    characters in a child, which `timeout` bounds. Raises `BuildFailed` with the reason and the path
    of the kept log, and `MissingDependency` where there is no compiler.
    """
    who = toolchain()
    root = directory or settings().cache_dir / "build"
    key = digest("cubin", source, arch, who)
    home = root / key[:2] / key
    cubin, facts = home / "kernel.cubin", home / "resources.json"
    if cubin.is_file() and facts.is_file():
        with contextlib.suppress(ValueError, TypeError, OSError):
            return Cubin(cubin, 0.0, Resources(**json.loads(facts.read_text())), True)
    start = time.monotonic()
    work = work_folder(home)
    try:
        try:
            if who.startswith("nvrtc") and len(source) > LARGE:
                binary, log = _nvrtc_apart(source, arch, timeout)
            elif who.startswith("nvrtc"):
                binary, log = _nvrtc(source, arch)
            else:
                binary, log = _nvcc(who.split(" ")[0], source, arch, timeout)
            resources = parse_resources(log)
        except BuildFailed as failed:
            kept = home.parent / f"{key}.failed.log"
            kept.write_text(failed.log + "\n" + source, encoding="utf-8")
            raise BuildFailed(failed.reason, str(kept)) from failed
        (work / "kernel.cu").write_text(source, encoding="utf-8")
        (work / "build.log").write_text(log, encoding="utf-8")
        (work / "resources.json").write_text(json.dumps(asdict(resources)), encoding="utf-8")
        (work / "kernel.cubin").write_bytes(binary)
        os.chmod(work, 0o755)
        try:
            os.rename(work, home)
        except OSError:
            if not cubin.is_file():  # not merely that another process was first
                shutil.rmtree(home, ignore_errors=True)
                os.rename(work, home)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return Cubin(cubin, time.monotonic() - start, resources, False)


def compile_cuda_many(
    sources: Sequence[str],
    arch: str,
    *,
    workers: int | None = None,
    timeout: float = 120.0,
    directory: Path | None = None,
) -> list[Cubin | BuildFailed]:
    """Compile several texts in parallel; one answer per text, in order. Equal texts are compiled
    once; a text that fails gives its `BuildFailed` and ends nothing.
    """

    def one(source: str) -> Cubin | BuildFailed:
        try:
            return compile_cuda(source, arch, timeout=timeout, directory=directory)
        except BuildFailed as failed:
            return failed

    toolchain()
    unique = list(dict.fromkeys(sources))
    with ThreadPoolExecutor(max_workers=max(1, workers or usable_cores())) as pool:
        answers = dict(zip(unique, pool.map(one, unique), strict=True))
    return [answers[s] for s in sources]


if __name__ == "__main__":
    sys.exit(_child(*sys.argv[1:]))
