"""What this machine has and lacks: `obelisk doctor`.

Takes nothing but the environment; gives one `Finding` per thing that some part of Obelisk needs,
with the remedy where it is missing. It promises to raise nothing, to import no optional package,
and to leave no file behind.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from obelisk.base.errors import BuildFailed, MissingDependency
from obelisk.base.settings import settings, usable_cores
from obelisk.build import compile_c, compiler_identity

COMPILER_SECONDS = 30
_PROBE = "int obelisk_probe(void) { return 0; }\n"
_OPTIONAL = {
    "torch": ("obelisk[torch]", "tensors of torch, and its times as baselines"),
    "triton": ("obelisk[triton]", "Triton kernels"),
    "cuda-core": ("obelisk[cuda]", "CUDA kernels"),
    "ray": ("obelisk[ray]", "search on several machines"),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at: `needed` says whether optimizing on a CPU depends on it."""

    name: str
    ok: bool
    needed: bool
    detail: str
    remedy: str = ""


def examine() -> list[Finding]:
    """Look at everything, the needed things first. Takes under a few seconds."""
    return [
        _python(),
        _cores(),
        _compiler(),
        _writable("cache directory", lambda: settings().cache_dir, "set OBELISK_CACHE to a folder"),
        _writable("temporary directory", lambda: Path(tempfile.gettempdir()), "set TMPDIR"),
        *(_required(name) for name in ("numpy", "ml_dtypes", "egglog", "ortools")),
        *(_optional(name) for name in _OPTIONAL),
        _gpu(),
    ]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def obelisk_version() -> str:
    """The installed version, or "0+unknown" when run from a tree that was never installed."""
    return _version("obelisk") or "0+unknown"


def _python() -> Finding:
    detail = f"{platform.python_version()}, obelisk {obelisk_version()}, {platform.platform()}"
    return Finding("python", sys.version_info >= (3, 11), True, detail, "use Python 3.11 or newer")


def _cores() -> Finding:
    now = settings()
    note = f", variables set: {', '.join(now.sources)}" if now.sources else ""
    return Finding("cores", True, True, f"{usable_cores()} usable, {now.threads} threads{note}")


def _compiler() -> Finding:
    """The compiler must not only exist but build a shared object."""
    remedy = (
        "install gcc or clang (Debian: apt-get install gcc libc6-dev), or set OBELISK_CC; without "
        "one, programs can be built, shown, searched and verified, but not compiled"
    )
    try:
        found = compiler_identity()
    except MissingDependency as error:
        return Finding("C compiler", False, True, str(error), remedy)
    try:
        with tempfile.TemporaryDirectory() as folder:
            compile_c(_PROBE, timeout=COMPILER_SECONDS, directory=Path(folder), identity=found)
    except (OSError, BuildFailed) as error:
        why = f"{found.version}, but it cannot build: {error}"
        return Finding("C compiler", False, True, why, remedy)
    return Finding("C compiler", True, True, f"{found.version} ({found.path})")


def _writable(name: str, folder: Callable[[], Path], remedy: str) -> Finding:
    """Try to make a file there, and take it away again."""
    path = Path()
    try:
        path = folder()
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path):
            pass
        free = shutil.disk_usage(path).free
    except OSError as error:
        return Finding(name, False, True, f"{path}: {error.strerror or error}", remedy)
    return Finding(name, True, True, f"{path}, {free / 1e9:.1f} GB free")


def _required(package: str) -> Finding:
    version = _version(package)
    return Finding(package, version is not None, True, version or "missing", "pip install obelisk")


def _optional(package: str) -> Finding:
    extra, use = _OPTIONAL[package]
    version = _version(package)
    if version:
        return Finding(package, True, False, version)
    return Finding(package, False, False, f"not installed; it brings {use}", f"pip install {extra}")


def _gpu() -> Finding:
    """Whether a CUDA device is there, without loading a driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None and not os.path.exists("/dev/nvidia0"):
        return Finding("GPU", False, False, "no NVIDIA device; --device cpu works without one")
    if tool is None:
        return Finding("GPU", True, False, "/dev/nvidia0")
    try:
        done = subprocess.run(
            [tool, "--query-gpu=name,driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=COMPILER_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("GPU", False, False, f"nvidia-smi: {error}")
    return Finding("GPU", done.returncode == 0, False, done.stdout.strip() or done.stderr.strip())
