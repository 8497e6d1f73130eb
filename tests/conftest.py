"""What all tests share: a cache of their own, and the data files that lie beside the repository."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DATA = ROOT.parent / "shared" / "data"


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Tests, and the processes they start, never touch the user's cache."""
    folder = tmp_path_factory.mktemp("obelisk-cache")
    before = os.environ.get("OBELISK_CACHE")
    os.environ["OBELISK_CACHE"] = str(folder)
    yield folder
    if before is None:
        del os.environ["OBELISK_CACHE"]
    else:
        os.environ["OBELISK_CACHE"] = before


@pytest.fixture(scope="session", autouse=True)
def _interruptible() -> Iterator[None]:
    """A shell starts what runs in its background with SIGINT ignored, and a process passes that on:
    tests of Ctrl-C, and the processes they start, could not be interrupted.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for one test."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("OBELISK_CACHE", str(folder))
    return folder


@pytest.fixture(scope="session")
def mugraphs() -> Path:
    """The folder of saved graphs; the test is skipped where it is absent."""
    folder = DATA / "mugraphs"
    if not folder.is_dir():
        pytest.skip(f"needs the saved graphs in {folder}, which are not there")
    return folder


@pytest.fixture(scope="session")
def compiler() -> str:
    """The C compiler's command; the test is skipped where there is none."""
    command = os.environ.get("OBELISK_CC") or os.environ.get("CC") or "cc"
    if shutil.which(command) is None:
        pytest.skip(f"needs a C compiler; {command!r} is not on the PATH")
    return command
