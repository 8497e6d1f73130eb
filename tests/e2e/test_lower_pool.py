"""The thread pool inside a kernel library: forks, exits, unloading, concurrent callers, several
libraries, idle cost.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from tests.lowering import largest_error

from obelisk.build import Library, compile_c
from obelisk.ir import KernelGraph, random_inputs, run
from obelisk.lower.cpu import CpuModule, lower_cpu
from obelisk.machine import host

pytestmark = pytest.mark.usefixtures("compiler")


def module(name: str, factor: float) -> tuple[CpuModule, Path]:
    """Two dependent kernels, cut into several blocks."""
    g = KernelGraph(name)
    x = g.input((64, 1024))
    g.output(g.sum(g.exp(g.mul(x, factor)), 1))
    made = lower_cpu(g.freeze(), host())
    return made, compile_c(made.source).path


def script(body: str, *args: str, seconds: float = 60) -> str:
    """Run Python text in a process of its own; it must end with code 0 in time."""
    text = textwrap.dedent(
        """
        import os, sys, threading, time
        import numpy as np
        from obelisk.build import Library
        path, size = sys.argv[1], int(sys.argv[2])
        x = np.ones((64, 1024), np.float32)
        def go(lib, threads=2):
            y = np.zeros((64, 1), np.float32)
            lib.run([x], [y], threads)
            assert abs(y - 1024 * np.exp(0.5)).max() < 1e-2, y
        lib = Library(path, size)
        """
    ) + textwrap.dedent(body)
    done = subprocess.run(
        [sys.executable, "-c", text, *args], capture_output=True, text=True, timeout=seconds,
        env=dict(os.environ), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def half() -> tuple[str, str]:
    """Path and scratch size of a built kernel."""
    made, path = module("half", 0.5)
    return str(path), str(made.scratch_bytes)


def test_forked_children_work_and_end(half: tuple[str, str]) -> None:
    """After the pool has run, a forked child runs kernels on threads of its own and exits at
    once.
    """
    script(
        """
        for _ in range(3):
            go(lib)
            pid = os.fork()
            if pid == 0:
                for _ in range(20): go(lib)
                sys.exit(0)
            go(lib)
            assert os.waitpid(pid, 0)[1] == 0
        """,
        *half,
    )


def test_a_child_that_never_calls_ends_too(half: tuple[str, str]) -> None:
    """A forked child with the pool's state, but not its threads, runs the library's end code and
    exits.
    """
    script(
        """
        go(lib)
        for _ in range(5):
            pid = os.fork()
            if pid == 0: sys.exit(0)
            assert os.waitpid(pid, 0)[1] == 0
        """,
        *half,
    )


def test_unloading_stops_the_workers(half: tuple[str, str]) -> None:
    """dlclose right after a call, and again: no thread is left to run code that is gone."""
    script(
        """
        import _ctypes
        before = threading.active_count()
        for i in range(10):
            fresh = Library(path, size)
            go(fresh, 4)
            if i % 2: time.sleep(0.01)
            _ctypes.dlclose(fresh._handle._handle)
            del fresh
        del lib
        time.sleep(0.2)
        import psutil
        print(psutil.Process().num_threads())
        """,
        *half,
    )


def test_concurrent_callers(half: tuple[str, str]) -> None:
    """Six threads of a program, each with scratch of its own, call one library at once."""
    script(
        """
        wrong = []
        def many():
            try:
                own = Library(path, size)
                for _ in range(200): go(own, 2)
            except BaseException as e: wrong.append(e)
        all_ = [threading.Thread(target=many) for _ in range(6)]
        [t.start() for t in all_]
        [t.join() for t in all_]
        assert not wrong, wrong
        """,
        *half,
    )


def test_exit_while_another_thread_calls(half: tuple[str, str]) -> None:
    """A daemon thread that is still calling does not keep the process from ending."""
    script(
        """
        def forever():
            while True: go(lib)
        threading.Thread(target=forever, daemon=True).start()
        time.sleep(0.3)
        os._exit(0) if sys.flags.dev_mode else sys.exit(0)
        """,
        *half,
        seconds=30,
    )


def test_several_libraries_take_turns() -> None:
    """Three libraries, called in turn from one process with different numbers of threads, stay
    right.
    """
    libraries = []
    for i in range(3):
        made, path = module(f"turn{i}", 0.1 * (i + 1))
        libraries.append((Library(path, made.scratch_bytes), 0.1 * (i + 1)))
    x = np.random.default_rng(0).standard_normal((64, 1024)).astype(np.float32)
    for turn in range(60):
        library, factor = libraries[turn % 3]
        y = np.zeros((64, 1), np.float32)
        library.run([x], [y], 1 + turn % 4)
        exact = np.exp(x.astype(np.float64) * factor).sum(1, keepdims=True)
        assert largest_error(y, exact) < 1e-5


def test_a_tiny_graph_starts_in_microseconds(half: tuple[str, str]) -> None:
    """The least time of a call of two tiny kernels on two threads is tens of microseconds, not
    more.
    """
    g = KernelGraph("tiny")
    x = g.input((4, 8))
    g.output(g.sum(g.exp(x), 1))
    graph = g.freeze()
    made = lower_cpu(graph, host())
    library = Library(compile_c(made.source).path, made.scratch_bytes)
    (array,) = random_inputs(graph, 0)
    out = np.zeros((4, 1), np.float32)
    best = 1.0
    for _ in range(3000):
        start = time.perf_counter()
        library.run([array], [out], 2)
        best = min(best, time.perf_counter() - start)
    assert largest_error(out, run(graph, [array])[0]) < 1e-6
    assert best < 100e-6


def test_an_idle_pool_costs_nothing(half: tuple[str, str]) -> None:
    """A second after the last call the workers sleep: the process uses no processor time."""
    out = script(
        """
        go(lib, 4)
        time.sleep(0.3)
        start = time.process_time()
        time.sleep(1.0)
        print(time.process_time() - start)
        """,
        *half,
    )
    assert float(out) < 0.1


def test_threads_of_the_caller_are_not_needed(half: tuple[str, str]) -> None:
    """A call from a thread that is not the main one works, and so do odd numbers of threads."""
    made, path = module("odd", 0.5)
    library = Library(path, made.scratch_bytes)
    x = np.ones((64, 1024), np.float32)
    wrong: list[int] = []

    def work() -> None:
        for n in (0, -3, 1, 2, 7, 10_000):
            y = np.zeros((64, 1), np.float32)
            library.run([x], [y], n)
            if largest_error(y, np.full((64, 1), 1024 * np.exp(0.5))) > 1e-5:
                wrong.append(n)

    caller = threading.Thread(target=work)
    caller.start()
    caller.join()
    assert not wrong
