"""Triton as a back end of `optimize`: one registration, builds as the stages ask, artifacts.

What runs on a GPU is tested in `test_device_triton.py`; building needs Triton and is skipped loudly
without it.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from tests.cuda_graphs import fused

from obelisk.app.backend_triton import BACKEND, TritonBuilt
from obelisk.app.backends import backend_of, ordinal_of
from obelisk.base.errors import BuildFailed, MissingDependency, UnknownName
from obelisk.build.device import module_from_json
from obelisk.build.triton import version
from obelisk.lower.cuda import CudaOptions
from obelisk.lower.triton import TritonOptions
from obelisk.machine import find

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
def test_both_compilers_race_in_turns(fresh_cache: Path) -> None:
    """The defaults of both come first; each text is built and packed by its own compiler."""
    both = backend_of("gpu")
    graph = fused()["gated"]
    options = both.options(graph, H200)
    assert options[:2] == [CudaOptions(), TritonOptions()]
    assert sum(isinstance(o, TritonOptions) for o in options) == len(BACKEND.options(graph, H200))
    made = [both.lower(graph, H200, o) for o in options[:2]]
    assert [m.label.startswith("Triton") for m in made] == [False, True]
    with ThreadPoolExecutor(2) as pool:
        build = both.builder(H200, pool)
        files = [both.files(m, build(m).result()) for m in made]
    for found in files:
        module = module_from_json(json.loads(found["module.json"]))
        assert len(module.kernels) == len(found) - 1
    assert files[0]["kernel0.cubin"] != files[1]["kernel0.cubin"]
    assert "triton" in both.toolchain()


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
