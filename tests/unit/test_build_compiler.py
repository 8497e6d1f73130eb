"""Compiling: results are shared by content, failures keep a log, time limits kill the whole process
group.
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest

from obelisk.base.errors import BuildFailed, MissingDependency
from obelisk.build import Library, compile_c, compile_many, compiler_identity

SOURCE = """
int obelisk_run(void *const *inputs, void *const *outputs, void *scratch, int threads) {
  ((float *)outputs[0])[0] = ((const float *)inputs[0])[0] + (float)threads;
  return ((unsigned long)scratch) % 64 ? 1 : 0;
}
"""
ENTRY = "int obelisk_run(void *const*i, void *const*o, void *s, int t) {{ return {0}; }}"


def visible(source: str) -> str:
    return source.replace(
        "int obelisk_run", '__attribute__((visibility("default"))) int obelisk_run'
    )


def fake_compiler(folder: Path, body: str, name: str = "fakecc") -> str:
    """A program that answers --version and otherwise runs `body`."""
    path = folder / name
    path.write_text(f'#!/bin/sh\ncase "$*" in *--version) echo "fake 1.0"; exit 0;; esac\n{body}\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.mark.usefixtures("compiler")
def test_a_build_is_made_once_and_runs(fresh_cache: Path) -> None:
    """The second request finds the first one's library; scratch is aligned; results are right."""
    first = compile_c(visible(SOURCE))
    second = compile_c(visible(SOURCE))
    assert not first.reused
    assert second.reused
    assert first.path == second.path
    assert first.path.is_relative_to(fresh_cache)
    x, y = np.array([2.5], np.float32), np.zeros(1, np.float32)
    Library(first.path, 100).run([x], [y], 3)
    assert y[0] == 5.5
    assert compile_c(visible(SOURCE) + "/* other */").path != first.path


@pytest.mark.usefixtures("compiler", "fresh_cache")
def test_errors_keep_their_log_and_leave_no_library() -> None:
    """A text that does not compile: the first error is the reason, the log says all, and a retry
    fails anew.
    """
    for _ in range(2):
        with pytest.raises(BuildFailed, match="error") as caught:
            compile_c("int broken( {")
        log = Path(caught.value.log)
        assert "error" in log.read_text()
        assert not list(log.parent.glob("**/kernel.so"))


@pytest.mark.usefixtures("compiler", "fresh_cache")
def test_many_texts_in_parallel() -> None:
    """One answer per text in order; a failure is an answer; equal texts are compiled once."""
    texts = [visible(ENTRY.format(i)) for i in (1, 2, 1)]
    answers = compile_many([*texts, "nonsense", texts[0]], workers=2)
    built = [a for a in answers if not isinstance(a, BuildFailed)]
    assert len(built) == 4
    assert isinstance(answers[3], BuildFailed)
    assert len({a.path for a in built}) == 2
    assert [Library(a.path).call([], [], 1) for a in built] == [1, 2, 1, 1]
    assert compile_many([]) == []


@pytest.mark.usefixtures("compiler", "fresh_cache")
def test_concurrent_builds_of_one_text() -> None:
    """Eight builders of one text all get a whole library at one path."""
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: compile_c(visible(SOURCE)), range(8)))
    assert len({a.path for a in answers}) == 1
    folder = answers[0].path.parent
    assert not list(folder.parent.glob(".*"))  # no half-made directory is left
    Library(folder / "kernel.so")


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """No such program: the error says which, and how to get or name another."""
    monkeypatch.setenv("OBELISK_CC", "no-such-compiler-77")
    with pytest.raises(MissingDependency, match=r"no-such-compiler-77.*OBELISK_CC"):
        compiler_identity()
    with pytest.raises(MissingDependency):
        compile_many(["int x;"])


def test_a_compiler_that_hangs_is_killed_with_its_children(
    fresh_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Past its time limit the compiler's whole process group ends; the reason names the limit."""
    marker = tmp_path / "pid"
    monkeypatch.setenv(
        "OBELISK_CC", fake_compiler(tmp_path, f"sleep 300 &\necho $! > {marker}\nsleep 300")
    )
    start = time.monotonic()
    with pytest.raises(BuildFailed, match="exceeded its 1 s") as caught:
        compile_c("int x;", timeout=1)
    assert time.monotonic() - start < 20
    assert Path(caught.value.log).is_file()
    child = int(marker.read_text())
    for _ in range(50):
        if not psutil.pid_exists(child) or psutil.Process(child).status() == "zombie":
            break
        time.sleep(0.1)
    else:
        pytest.fail("the compiler's child is still running")


def test_a_compiler_that_crashes_is_a_failed_build(
    fresh_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A signal, an exit code without output, and success without a library are three named
    failures.
    """
    for body, reason in (
        ("kill -SEGV $$", "SIGSEGV"), ("exit 3", "exit code 3"), ("exit 0", "exit code 0")
    ):  # fmt: skip
        monkeypatch.setenv("OBELISK_CC", fake_compiler(tmp_path, body))
        with pytest.raises(BuildFailed, match=reason):
            compile_c(f"int x; /* {reason} */")


def test_identity_depends_on_the_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another version or other flags in the command are another compiler."""
    path = fake_compiler(tmp_path, "exit 1")
    monkeypatch.setenv("OBELISK_CC", path)
    one = compiler_identity()
    monkeypatch.setenv("OBELISK_CC", f"{path} -m32")
    assert compiler_identity().digest != one.digest
    monkeypatch.setenv("OBELISK_CC", path)
    Path(path).write_text(Path(path).read_text().replace("fake 1.0", "fake 1.1"))
    assert compiler_identity().digest != one.digest


@pytest.mark.usefixtures("compiler")
def test_spaces_in_paths_and_other_locales(tmp_path: Path) -> None:
    """A cache under a path with spaces and non-ASCII letters, in a process with a non-C locale."""
    cache = tmp_path / "a b" / "größe"
    code = (
        "from obelisk.build import compile_c, Library\n"
        f"b = compile_c({visible(ENTRY.format(7))!r})\n"
        "print(Library(b.path).call([], [], 1))\n"
    )
    for locale in ("C", "de_DE.UTF-8", "tr_TR.UTF-8"):
        env = {**os.environ, "OBELISK_CACHE": str(cache), "LC_ALL": locale, "PYTHONUTF8": "0"}
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
        )
        assert done.stdout.strip() == "7", done.stderr


def test_an_unwritable_cache_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where nothing can be written the error names the directory and the variable that moves it."""
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    monkeypatch.setenv("OBELISK_CACHE", str(blocked))
    monkeypatch.setenv("OBELISK_CC", fake_compiler(tmp_path, "exit 0"))
    with pytest.raises(BuildFailed, match=r"cannot write.*OBELISK_CACHE"):
        compile_c("int x;")


def test_what_is_no_kernel_library(tmp_path: Path) -> None:
    """A file that is no library, and one that is not there, are refused by name."""
    (tmp_path / "text.so").write_text("not a library")
    for name in ("text.so", "absent.so"):
        with pytest.raises(BuildFailed, match=name):
            Library(tmp_path / name)
