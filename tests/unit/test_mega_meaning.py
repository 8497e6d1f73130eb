"""What a model means, operator by operator: against the virtual machine's steps, and in little
memory.
"""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.mega_gptq import save_gptq
from tests.mega_models import config, random_tensors, save_model

from obelisk.mega.cuda.layout import cuda_layout
from obelisk.runtime import Checkpoint
from obelisk.runtime.packing import quantise, stored
from obelisk.schedule import Sync, meaning, place
from obelisk.schedule.meaning import Meaning
from obelisk.schedule.vm import VirtualMachine
from obelisk.tasks import StepShape, Tiling, Workload, parse_config, parse_format
from obelisk.tasks.weights import EMBED, HEAD

MODELS = {
    "llama": config("llama", num_hidden_layers=2, tie_word_embeddings=False),
    "qwen2": config("qwen2", num_hidden_layers=2, tie_word_embeddings=True),
    "qwen3": config("qwen3", num_hidden_layers=3, vocab_size=203),
    "biases": config("llama", num_hidden_layers=1, attention_bias=True, mlp_bias=True),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("block", [1 << 8, 1 << 22])
def test_it_is_what_steps_compute(name: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits, keys and values of two texts in one pass and step by step; products in many tasks, by
    several threads, and whole.
    """
    monkeypatch.setattr(meaning, "BLOCK", block)
    monkeypatch.setattr(meaning, "usable_cores", lambda: 4)
    c = MODELS[name]
    model, tensors = parse_config(c), random_tensors(c, 2)
    tokens = np.random.default_rng(1).integers(0, model.vocab, (2, 5))
    means = Meaning(model, 2, 5, lambda n, rows: tensors[n][rows])
    got = means.forward(tokens)
    shape = StepShape(model, Workload(2, 5), Tiling(cores=2))
    machine = VirtualMachine(place(shape, Sync.COUNTER), tensors.__getitem__)
    want = np.stack([machine.step(tokens[:, t]) for t in range(5)], 1)
    assert np.abs(got - want).max() < 1e-12 * np.abs(want).max()
    for mine, theirs in ((means.keys, machine.keys), (means.values, machine.values)):
        assert np.abs(mine - theirs).max() < 1e-12 * np.abs(theirs).max()


@pytest.mark.parametrize("form", ["bf16", "fp16", "int8", "w4a16"])
@pytest.mark.parametrize("kept", ["f32", "bf16", "gptq"])
def test_rows_are_those_of_whole_tensors(tmp_path: Path, form: str, kept: str) -> None:
    """Every format from every kind of checkpoint: what an arena means, asked for by rows."""
    c = config("qwen3", num_hidden_layers=1)
    tensors = random_tensors(c, 3)
    if kept == "gptq":
        save_gptq(tmp_path, c, tensors, group=32, symmetric=True)
    else:
        kind = ml_dtypes.bfloat16 if kept == "bf16" else np.float32
        save_model(tmp_path, c, {k: v.astype(kind) for k, v in tensors.items()})
    work = Workload(1, 8, parse_format(form), 32)
    layout, files = cuda_layout(parse_config(c), work), Checkpoint(tmp_path)
    whole = stored(layout, files.tensor, files.grouped)
    by_rows = stored(layout, files.tensor, files.grouped, files.rows)
    for name, tensor in tensors.items():
        want = whole(name)
        assert want.dtype == np.float32
        assert want.shape == tensor.shape
        for rows in (slice(None), slice(3, 7), slice(len(want) - 1, None)):
            assert np.array_equal(by_rows(name, rows), want[rows]), (name, rows)


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_of_its_own_is_what_its_rows_mean(tmp_path: Path, tied: bool) -> None:
    """In 8 bits beside an embedding in 16, of one tensor or of two: whole and by rows; and the
    logits of a text follow the head, those of the embedding's tensor being others.
    """
    c = config("qwen3", num_hidden_layers=1, tie_word_embeddings=tied)
    means = save_gptq(tmp_path, c, random_tensors(c, 3), group=32, symmetric=True)
    model, head = parse_config(c), parse_format("int8")
    work = Workload(1, 8, parse_format("w4a16"), 32, head=head)
    layout, files = cuda_layout(model, work), Checkpoint(tmp_path)
    whole = stored(layout, files.tensor, files.grouped)
    by_rows = stored(layout, files.tensor, files.grouped, files.rows)
    q, scale = quantise(means[EMBED if tied else HEAD])
    want = {HEAD: q * scale[:, None], EMBED: means[EMBED]}
    for name, rows in want.items():
        assert np.array_equal(whole(name), rows), name
        assert np.array_equal(by_rows(name, slice(3, 7)), rows[3:7]), name
    tokens = np.array([[1, 2, 3]])
    got, other = (
        Meaning(model, 1, 3, by_rows, head=h).forward(tokens) for h in (head, None)
    )  # fmt: skip
    assert np.array_equal(got, other) is not tied


def test_memory_does_not_grow_with_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times the layers and the vocabulary: as much memory, but for pages."""
    monkeypatch.setattr(meaning, "BLOCK", 1 << 12)
    monkeypatch.setattr(meaning, "usable_cores", lambda: 2)
    peaks = []
    line = np.random.default_rng(0).standard_normal(1 << 16).astype(np.float32)
    for layers, vocab in ((1, 2048), (4, 8192)):
        c = config("llama", num_hidden_layers=layers, vocab_size=vocab, hidden_size=128)
        model = parse_config(c)

        def rows(name: str, which: slice, model: Any = model) -> Any:
            wide = {"down_proj": model.ffn, "o_proj": model.q_width}
            cols = next((v for k, v in wide.items() if k in name), model.hidden)
            if "norm" in name:
                return line[: model.hidden][which]
            count = (which.stop or 0) - (which.start or 0)
            return line[: count * cols].reshape(count, cols)

        means = Meaning(model, 1, 2, rows)
        tracemalloc.start()
        logits = means.forward(np.array([[1, 2]]))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert np.isfinite(logits).all()
        assert 4 * model.vocab * model.hidden > 10 * meaning.BLOCK
    assert peaks[1] < peaks[0] + 8 * 20 * 8192, peaks
