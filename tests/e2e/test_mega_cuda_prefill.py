"""Prompts outside the CUDA kernel: the same keys, values and tokens as the kernel's own.

Torch's code is the one that runs on a device, here on tensors in host memory; the kernel's keys and
values come from its text on the twin. Where torch is missing, and where memory is short, the kernel
runs prompts itself.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from tests import mega_cuda_twin as twin
from tests.mega_cuda_checks import planned
from tests.mega_cuda_models import MODELS, Rounded
from tests.mega_models import random_tensors

from obelisk.app import synth_cuda
from obelisk.base.errors import CallError, UserError
from obelisk.engine import Engine
from obelisk.machine import find
from obelisk.mega.cuda.layout import cuda_layout
from obelisk.plan import Plan
from obelisk.runtime import CudaSession
from obelisk.runtime import cuda as runtime
from obelisk.runtime.gptq import Grouped
from obelisk.runtime.packing import pack, quantise_groups, stored
from obelisk.runtime.prefill import Segment
from obelisk.tasks import Workload, parse_config, parse_format

torch = pytest.importorskip("torch", reason="needs torch: pip install -r requirements-torch.lock")
if not twin.SUPPORTED or shutil.which("g++") is None:
    pytest.skip("needs g++ on x86-64, to run fibers", allow_module_level=True)

from obelisk.runtime import prefill_torch, unpacking_torch  # noqa: E402 (they import torch)

CONTEXT = 96
# Of the largest key or value: one step of 16 bits, and what the kernel's marks move; fp32: of sums.
CLOSE = {"fp32": 3e-6, "bf16": 2e-2, "fp16": 2.5e-3, "int8": 2.5e-3, "w4a16": 2.5e-3}
Array = Any


@pytest.fixture(autouse=True)
def _twin(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp() / "twin"
    folder.mkdir(exist_ok=True)
    monkeypatch.setattr(synth_cuda, "build", lambda e, m: twin.build_twin(e.source, folder))
    monkeypatch.setattr(runtime, "Device", twin.TwinDevice)
    monkeypatch.setattr(runtime, "Kernel", twin.TwinKernel)


def plan_of(name: str, batch: int = 1, form: str = "bf16", context: int = CONTEXT) -> Plan:
    """A plan of a small model on three blocks."""
    machine = replace(find("h200"), cores=3)
    model = parse_config(MODELS[name])
    return planned(model, Workload(batch, context, parse_format(form)), "", machine)


def session_of(name: str, batch: int = 1, form: str = "bf16", context: int = CONTEXT) -> Any:
    """A session on the twin."""
    plan = plan_of(name, batch, form, context)
    return CudaSession(plan, pack(plan.layout, random_tensors(MODELS[name], 4).__getitem__))


def prompts_of(lengths: list[int], vocab: int = 259) -> list[list[int]]:
    """Random prompts."""
    rng = np.random.default_rng(sum(lengths))
    return [[int(t) for t in rng.integers(0, vocab, n)] for n in lengths]


def held(session: Any) -> list[Array]:
    """Keys and values as float32."""
    return list(session.cached(session.plan.context))


def fill(session: Any, byte: int) -> None:
    """Forget everything; every byte of the cache is `byte`."""
    session.reset()
    raw = np.full(session.plan.cache.nbytes // 2, byte, np.uint8)
    for at in (session.key_memory, session.value_memory):
        session.device.upload(at, raw)


def apart(got: list[Array], want: list[Array]) -> float:
    """The largest difference, relative to the largest number."""
    return max(float(np.abs(g - w).max() / np.abs(w).max()) for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize(
    ("name", "form"),
    [("qwen3, 24", "bf16"), ("qwen3, 24", "fp16"), ("llama, groups of 4", "bf16"),
     ("qwen2, groups of 7, tied", "bf16"), ("llama, no groups, biases, odd sizes", "bf16"),
     ("llama, no groups, biases, odd sizes", "fp16"), ("qwen3, 24", "int8"),
     ("llama, no groups, biases, odd sizes", "int8"), ("llama, groups of 4", "w4a16"),
     ("qwen3, 24", "w4a16"), ("qwen3, 24", "fp32"),
     ("llama, no groups, biases, odd sizes", "fp32")],
)  # fmt: skip
def test_keys_and_values_are_the_kernel_s(name: str, form: str) -> None:
    """Every family, biases, head norms, odd sizes, every format; behind the prompt nothing changes.
    Both are as close to the float64 reference that rounds as the kernel does.
    """
    session = session_of(name, form=form, context=32)
    (prompt,) = prompts_of([21])
    session._run([runtime._Part(tuple(prompt), 22, 21, 0, runtime.Sampling())], (), 21)
    want = [part[:, :, :, :21] for part in held(session)]
    fill(session, 0x41)
    before = held(session)
    assert session.outside([prompt])
    assert list(session.position) == [21]
    got = held(session)
    for now, then in zip(got, before, strict=True):
        assert np.array_equal(now[:, :, :, 21:], then[:, :, :, 21:])
    got = [part[:, :, :, :21] for part in got]
    assert apart(got, want) < CLOSE[form]
    tensors = random_tensors(MODELS[name], 4)
    means = stored(session.plan.layout, tensors.__getitem__)
    kind = session.plan.cache.format
    reference = Rounded(MODELS[name], {k: means(k) for k in tensors}, kind)
    for token in prompt:
        reference.step(token)
    right = [np.stack(x)[:, None].swapaxes(2, 3) for x in (reference.keys, reference.values)]
    assert apart(got, right) < max(min(2e-3, CLOSE[form]), 1.5 * apart(want, right))


def test_slots_of_different_lengths_pieces_and_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle slot stays as it was; a prompt that continues a cache, in blocks of any size and
    queries a few at a time, is one prompt.
    """
    session = session_of("qwen3, 24", 4)
    feeds = [*prompts_of([33]), [], *prompts_of([5, 80])]
    fill(session, 0)
    assert session.outside(feeds)
    assert list(session.position) == [33, 0, 5, 80]
    want = held(session)
    assert not want[0][:, 1].any()
    monkeypatch.setattr(prefill_torch, "SCORES", 1)
    for size in (7, 64):
        fill(session, 0)
        session._prompts.block = size
        assert session.outside([f[:3] for f in feeds])
        assert session.outside([f[3:] for f in feeds])
        assert list(session.position) == [33, 0, 5, 80]
        assert apart(held(session), want) < 1e-2


def test_tokens_are_those_of_the_kernel_alone() -> None:
    """A prompt outside the kernel and then a launch, against a launch of everything: each token is
    the same or, by its logits, as good; the break-even is the session's.
    """
    session = session_of("llama, groups of 4", 2)
    prompts = prompts_of([40, 4])
    engine = Engine(session)
    outside = engine.generate(prompts, 6)
    assert (engine.timing.prefilled, engine.timing.steps) == (39, 9)
    alone = Engine(session, None)
    inside = alone.generate(prompts, 6)
    assert alone.timing.prefilled == 0
    assert outside[1] == inside[1]
    session.keep_logits = True
    session.reset()
    first = next((i for i in range(6) if outside[0].tokens[i] != inside[0].tokens[i]), None)
    if first is not None:
        session.launch([[*prompts[0], *inside[0].tokens[:first]]], [1])
        logits = session.logits()[0]
        ours = logits[outside[0].tokens[first]]
        assert float(logits.max() - ours) < 2e-2 * float(np.abs(logits).max())


def test_limits_hold() -> None:
    """The plan's context is exact for prompts outside the kernel."""
    session = session_of("qwen3, 24")
    (full,) = prompts_of([CONTEXT])
    session.prefill([full])
    assert list(session.position) == [CONTEXT]
    with pytest.raises(CallError, match=f"slot 0: 1 tokens, but 0 positions .* of {CONTEXT}"):
        session.prefill([[1]])
    session.reset()
    with pytest.raises(CallError, match=f"{CONTEXT + 1} tokens, but {CONTEXT} positions"):
        session.prefill([[*full, 1]])
    with pytest.raises(CallError, match="expected 0 to 258"):
        session.prefill([[*full[:40], 259]])
    assert list(session.position) == [0]


def test_without_torch_the_kernel_runs_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """No torch, and no torch imported yet: the length from which it is asked for."""
    session = session_of("qwen3, 24")
    assert session.prefill_from == runtime.PREFILL_FROM
    monkeypatch.delitem(sys.modules, "torch")
    assert session.prefill_from == runtime.IMPORT_SECONDS / runtime.STEP_SECONDS
    monkeypatch.setattr(runtime, "has_torch", lambda: False)
    session = session_of("qwen3, 24")
    assert session.prefill_from is None
    engine = Engine(session)
    engine.generate(prompts_of([30]), 2)
    assert (engine.timing.prefilled, engine.timing.steps) == (0, 31)


def test_memory_that_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Smaller blocks of tokens first; then the kernel, with a warning, and the same tokens."""
    session = session_of("qwen3, 24")
    (prompt,) = prompts_of([60])
    want = Engine(session, None).generate([prompt], 4)
    real, room = prefill_torch.TorchPrefill._layer, [1024]

    def short(self: Any, *args: Any) -> None:
        if self.block > room[0]:
            raise prefill_torch.OutOfMemory("no room")
        real(self, *args)

    monkeypatch.setattr(prefill_torch.TorchPrefill, "_layer", short)
    session.reset()
    session.prefill([prompt])
    assert session._prompts.block == 1024
    room[0] = 0
    session.reset()
    with pytest.warns(RuntimeWarning, match="no memory left"):
        assert Engine(session).generate([prompt], 4) == want
    assert session.prefill_from is None


@pytest.mark.parametrize("most", [0, 1, 3, 6])
def test_a_session_without_room_leaves_nothing(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Device memory ends after some pieces: the error is told, and every piece is given back."""
    devices: list[Any] = []
    plain = twin.TwinDevice.allocate

    def short(self: Any, nbytes: int) -> int:
        devices.append(self)
        if len(self.held) == most:
            raise UserError("the plan needs 1 bytes more, the device has 0 of 0 free")
        return plain(self, nbytes)

    monkeypatch.setattr(twin.TwinDevice, "allocate", short)
    with pytest.raises(UserError, match="bytes more"):
        session_of("qwen3, 24", context=32)
    assert devices
    assert not devices[0].held


@pytest.mark.parametrize(
    ("form", "zeros"),
    [("bf16", False), ("fp16", False), ("int8", False), ("w4a16", False), ("w4a16", True),
     ("w4a16:64", True)],
)  # fmt: skip
def test_unpacking_is_the_inverse_of_packing(form: str, zeros: bool) -> None:
    """Every matrix of a layer, and rows of the embedding, as `stored` means them; 4-bit weights to
    one rounding to fp16, with zeros of their own or without.
    """
    name = "llama, no groups, biases, odd sizes"
    kind, _, group = form.partition(":")
    work = replace(Workload(1, 64, parse_format(kind)), zeros=zeros)
    layout = cuda_layout(parse_config(MODELS[name]), replace(work, group=int(group or work.group)))
    tensors = random_tensors(MODELS[name], 3)
    rng = np.random.default_rng(1)

    @cache
    def grouped(key: str) -> Grouped | None:
        if not zeros or "layers" not in key or tensors[key].ndim < 2:
            return None
        made = quantise_groups(tensors[key], int(group or work.group))
        return replace(made, zero=rng.integers(0, 16, made.zero.shape).astype(np.uint8))

    arena = torch.from_numpy(pack(layout, tensors.__getitem__, grouped))
    means = stored(layout, tensors.__getitem__, grouped)
    names = {"o": "self_attn.o_proj", "down": "mlp.down_proj"}
    for m in layout.layer_matrices:
        if m.name in names:
            want = means(f"model.layers.0.{names[m.name]}.weight")
            got = unpacking_torch.reader(arena, layout.layer_offset, m)()
            value = got.value.float() if got.scale is None else got.value * got.scale[:, None]
            off = np.abs(value.float().numpy()[: len(want)] - want).max()
            assert off <= (2**-11 if kind == "w4a16" else 0) * np.abs(want).max()
    table = means("model.embed_tokens.weight")
    which = torch.tensor([0, 258, 7, 7, 100])
    got = unpacking_torch.rows_of(arena, 0, layout.matrices[0], which).numpy()
    assert np.array_equal(got, table[which.numpy()])


def test_a_key_in_the_wrong_place_shows() -> None:
    """The comparison can fail: positions off by one."""
    session = session_of("qwen3, 24", context=32)
    (prompt,) = prompts_of([21])
    assert session.outside([prompt])
    want = held(session)
    fill(session, 0)
    session._prompts.run([Segment(0, 1, tuple(prompt))])
    assert apart([c[:, :, :, 1:22] for c in held(session)], [c[:, :, :, :21] for c in want]) > 0.5
