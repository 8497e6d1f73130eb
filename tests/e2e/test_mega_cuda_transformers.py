"""The CUDA megakernel's text, executed on a CPU, against `transformers` in fp32 on checkpoints that
it wrote: every token is its own greedy choice, or as good to within what 16-bit inputs of products
cost; with fp32 weights to within what the order of fp32 sums does.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tests import mega_cuda_twin as twin
from tests.e2e.test_mega_transformers import PROMPT, model_of, worst_choice
from tests.mega_cuda_checks import planned

from obelisk.app import synth_cuda
from obelisk.engine import Engine
from obelisk.machine import find
from obelisk.runtime import Checkpoint, CudaSession
from obelisk.runtime import cuda as runtime
from obelisk.runtime.packing import pack
from obelisk.tasks import Workload, parse_format, read_config

if not twin.SUPPORTED or shutil.which("g++") is None:
    pytest.skip("needs g++ on x86-64, to run fibers", allow_module_level=True)

TOKENS = 64
NEAR = {"bf16": 0.02, "fp32": 1e-5}  # of the largest logit: what inputs of products move it by


@pytest.mark.parametrize(
    ("name", "form"),
    [("llama3-bf16", "bf16"), ("qwen2.5-0.5b-bf16", "bf16"), ("llama3", "fp32"),
     ("qwen3-4b", "fp32")],
)  # fmt: skip
def test_greedy_tokens(
    name: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt by the kernel's own prefill, then 64 tokens."""
    monkeypatch.setattr(synth_cuda, "build", lambda e, m: twin.build_twin(e.source, tmp_path))
    monkeypatch.setattr(runtime, "Device", twin.TwinDevice)
    monkeypatch.setattr(runtime, "Kernel", twin.TwinKernel)
    model = model_of(tmp_path / "model", name)
    config = read_config(tmp_path / "model")
    machine = replace(find("h200"), cores=3)
    plan = planned(config, Workload(1, 96, parse_format(form)), "", machine)
    arena = pack(plan.layout, Checkpoint(tmp_path / "model").tensor)
    made = list(Engine(CudaSession(plan, arena)).generate([PROMPT], TOKENS, stops=[])[0].tokens)
    assert len(made) == TOKENS
    assert len(set(made)) > 8
    import torch

    with torch.no_grad():
        largest = float(model(torch.tensor([PROMPT + made])).logits.abs().max())
    assert worst_choice(model, PROMPT, made) <= NEAR[form] * largest
