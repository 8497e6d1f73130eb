"""What Obelisk is compared with on a GPU computes the same programs: each way, on CPU tensors.

The kernel libraries are stood in for by modules with their calls' conventions, so that what is
tested here is how they are called.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from obelisk.app.contenders_cuda import (
    EAGER,
    LIBRARIES,
    _idiom,
    _not_for,
    prepared,
)
from obelisk.app.programs import PROGRAMS
from obelisk.ir import random_inputs, run
from obelisk.ir.jsonform import to_json

torch: Any = pytest.importorskip("torch", reason="torch is not installed")


def prefill(q: Any, k: Any, v: Any, *, sm_scale: float) -> Any:
    """FlashInfer's single_prefill_with_kv_cache: (tokens, heads, dim), contiguous."""
    assert q.is_contiguous()
    assert k.is_contiguous()
    assert v.is_contiguous()
    heads = [x.transpose(0, 1) for x in (q, k, v)]
    scores = torch.softmax(heads[0] @ heads[1].transpose(1, 2) * sm_scale, -1)
    return (scores @ heads[2]).transpose(0, 1).contiguous()


def norm(x: Any, weight: Any, eps: float = 0.0) -> Any:
    """A library's rms norm over the last axis with a gain."""
    assert weight.shape == x.shape[-1:]
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), eps=eps) * weight.to(x.dtype)


def swiglu(gate: Any, up: Any) -> Any:
    """Liger's product of a gate through silu and another product."""
    return torch.nn.functional.silu(gate) * up


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules with the libraries' names and calls."""

    def add(name: str, **calls: Any) -> None:
        made = ModuleType(name)
        vars(made).update(calls)
        monkeypatch.setitem(sys.modules, name, made)

    add("flashinfer", single_prefill_with_kv_cache=prefill)
    add("quack", rmsnorm=norm)
    for package in ("liger_kernel", "liger_kernel.transformers"):
        add(package)
    add("liger_kernel.transformers.functional", liger_rms_norm=norm, liger_swiglu=swiglu)


def check(name: str, rival: str) -> None:
    """The rival's outputs against the program's float64 meaning, small scores."""
    program = PROGRAMS[name]
    graph = program.graph()
    arrays = random_inputs(graph, 0, 0.2)
    tensors = [torch.from_numpy(a) for a in arrays]
    tensors = prepared(rival, program, tensors)
    call = _idiom(torch, rival, program, None)
    got = call(*tensors).numpy()
    (want,) = run(graph, arrays)
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < 1e-4


@pytest.mark.parametrize("name", ["lora", "ntrans", "rmsnorm", "mqa"])
def test_eager_torch(name: str) -> None:
    """torch's own idiom."""
    check(name, EAGER)


@pytest.mark.parametrize("name", ["gqa", "qknorm", "attention"])
def test_fused_attention_with_keys_laid_out_as_it_wants_them(name: str) -> None:
    """The same numbers, and the call gets K contiguous along its dim."""
    check(name, "sdpa math")
    program = PROGRAMS[name]
    tensors = [torch.zeros(*shape) for shape in program.shapes.values()]
    k = prepared("sdpa math", program, tensors)[1]
    assert k.shape == tensors[1].shape
    rows = k if program.shapes["k"][1] > program.shapes["k"][2] else k.transpose(-1, -2)
    assert rows.is_contiguous()


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize(
    ("name", "rival"),
    [
        ("gqa", "flashinfer"), ("mha", "flashinfer"), ("rmsnorm", "liger"), ("qknorm", "liger"),
        ("rmsnorm", "quack"), ("qknorm", "quack"), ("gated_mlp", "liger"),
    ],
)  # fmt: skip
def test_kernel_libraries_are_called_by_their_conventions(name: str, rival: str) -> None:
    """Layouts, gains and scales: what comes back is the program's result."""
    check(name, rival)


def test_a_program_without_a_name_runs_operator_by_operator() -> None:
    """Any other graph goes through the translation."""
    graph = PROGRAMS["ntrans"].graph()
    arrays = random_inputs(graph, 1)
    got = _idiom(torch, EAGER, None, to_json(graph))(*map(torch.from_numpy, arrays))
    np.testing.assert_allclose(got.numpy(), run(graph, arrays)[0], rtol=1e-3, atol=1e-4)


def test_what_does_not_apply_says_why() -> None:
    """A library that is not installed, a call that does not cover the program, an unknown name."""
    for name in LIBRARIES:
        assert _not_for(name, PROGRAMS["gqa"]) in ("not installed", "no call for this program", "")
    assert "not an attention" in _not_for("sdpa flash", PROGRAMS["lora"])
    assert "nothing beside the call" in _not_for("compiled sdpa flash", PROGRAMS["gqa"])
    assert _not_for("compiled sdpa flash", PROGRAMS["qknorm"]) == ""
    assert "not known" in _not_for("abacus", PROGRAMS["gqa"])
