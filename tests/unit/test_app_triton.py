"""Triton as a back end of `optimize`: one registration, builds as the stages ask, artifacts.

What runs on a GPU is tested in `test_device_triton.py`; building needs Triton and is skipped loudly
without it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from tests.cuda_graphs import fused

from obelisk.app import backend_triton
from obelisk.app.backend_triton import BACKEND, TritonBuilt
from obelisk.app.backends import backend_of, ordinal_of
from obelisk.base.errors import BuildFailed, MissingDependency, UnknownName
from obelisk.build.cuda import Resources
from obelisk.build.device import module_from_json
from obelisk.build.triton import TritonCubin, version
from obelisk.lower.cuda import CudaOptions
from obelisk.lower.triton import TritonKernel, TritonOptions
from obelisk.machine import Machine, find

H200 = find("h200")
try:
    version()
    HERE = True
except MissingDependency:
    HERE = False
needs_triton = pytest.mark.skipif(not HERE, reason="NOT RUN: Triton is not installed")


def test_the_device_is_known_by_name_and_number() -> None:
    assert backend_of("triton") is BACKEND
    assert backend_of("triton:1") is BACKEND
    assert ordinal_of("triton:1") == 1
    assert BACKEND.name == "triton"
    with pytest.raises(UnknownName, match="triton, triton:N"):
        backend_of("triton:first")


def test_options_and_ablations_are_tritons_own() -> None:
    options = BACKEND.options(fused()["gated"], H200)
    assert options[0] == TritonOptions()
    for changes in BACKEND.ablations.values():
        assert replace(options[0], **changes) != options[0]


@needs_triton
def test_both_targets_race_in_turns(fresh_cache: Path) -> None:
    """The defaults of both come first; each text is built and packed by its own compiler."""
    both = backend_of("cuda")
    graph = fused()["gated"]
    options = both.options(graph, H200)
    assert options[:2] == [CudaOptions(), TritonOptions()]
    assert sum(isinstance(o, TritonOptions) for o in options) == len(BACKEND.options(graph, H200))
    made = [both.lower(graph, H200, o) for o in options[:2]]
    assert [m.target for m in made] == ["CUDA C++", "Triton"]
    assert [m.launches for m in made] == [1, 1]
    with ThreadPoolExecutor(2) as pool:
        build = both.builder(H200, pool)
        files = [both.files(m, build(m).result()) for m in made]
    for found in files:
        module = module_from_json(json.loads(found["module.json"]))
        assert len(module.kernels) == len(found) - 1
    assert files[0]["kernel0.cubin"] != files[1]["kernel0.cubin"]
    assert "triton" in both.toolchain()
    assert "triton" not in backend_of("cuda-c").toolchain()


@needs_triton
def test_a_module_becomes_a_bundle_and_files(fresh_cache: Path) -> None:
    graph = fused()["attention split"]
    made = BACKEND.lower(graph, H200, TritonOptions())
    assert "def obelisk_kernel" in made.source
    with ThreadPoolExecutor(1) as pool:
        built = BACKEND.builder(H200, pool)(made).result()
    assert isinstance(built, TritonBuilt)
    bundle = json.loads(built.path.read_text())
    files = BACKEND.files(made, built)
    assert sorted(files) == ["kernel0.cubin", "kernel1.cubin", "module.json"]
    assert [Path(c).read_bytes() for c in bundle["cubins"]] == [
        files["kernel0.cubin"], files["kernel1.cubin"]
    ]  # fmt: skip
    module = module_from_json(json.loads(files["module.json"]))
    assert module.launches == built.module.launches
    assert made.scratch_bytes > module.scratch_bytes > 0


@needs_triton
def test_modules_share_child_processes(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits when a thread is free is compiled by one child; every module gets its own answer,
    also where a neighbour's build fails, and one that was called off is left out.
    """
    graph, calls = fused()["gated"], list[int]()
    made = [BACKEND.lower(graph, H200, o) for o in BACKEND.options(graph, H200)[:4]]

    def compile_many(
        kernels: Sequence[TritonKernel], machine: Machine, **_: Any
    ) -> list[TritonCubin | BuildFailed]:
        calls.append(len(kernels))
        good = TritonCubin(fresh_cache / "k.cubin", 0.1, 0, 128, Resources(32, 0, 0, 0, 0), False)
        bad = made[1].module.kernels
        return [BuildFailed("no") if k in bad else good for k in kernels]

    fresh_cache.mkdir(parents=True)
    (fresh_cache / "k.cubin").write_bytes(b"a cubin")
    monkeypatch.setattr(backend_triton, "compile_triton_many", compile_many)
    monkeypatch.setenv("OBELISK_THREADS", "1")
    with ThreadPoolExecutor(1) as pool:
        gate = Event()
        pool.submit(gate.wait)
        build = BACKEND.builder(H200, pool)
        futures = [build(m) for m in made]
        assert futures[3].cancel()
        gate.set()
        assert isinstance(futures[0].result(), TritonBuilt)
        assert isinstance(futures[2].result(), TritonBuilt)
        with pytest.raises(BuildFailed, match="no"):
            futures[1].result()
    assert calls == [3]


@needs_triton
def test_a_build_that_fails_says_so(fresh_cache: Path) -> None:
    made = BACKEND.lower(fused()["gated"], H200, TritonOptions())
    tiny = replace(H200, name="tiny", shared_bytes=1000)
    with ThreadPoolExecutor(1) as pool:
        future = BACKEND.builder(tiny, pool)(made)
        with pytest.raises(BuildFailed, match="tiny has 1000"):
            future.result()


@needs_triton
def test_the_toolchain_is_named() -> None:
    assert BACKEND.toolchain() == f"triton {version()}"
