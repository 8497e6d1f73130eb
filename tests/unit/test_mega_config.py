"""Configurations, rotary tables and limits: what is read, and what is refused by name."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.mega_models import config

from obelisk.base.errors import ParseError, UnknownName, UserError
from obelisk.mega.cuda.layout import cuda_layout
from obelisk.schedule.gpu_resources import weight_bytes
from obelisk.tasks import (
    MAX_BATCH,
    ModelConfig,
    RopeType,
    StepShape,
    Tiling,
    WeightFormat,
    Workload,
    inverse_frequencies,
    parse_config,
    parse_format,
    parse_head,
    parse_weights,
    read_config,
    rope_table,
    weight_layout,
)
from obelisk.tasks.weights import EMBED, HEAD, head_tensor

LLAMA3 = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def test_head_dim_is_read_and_need_not_divide_hidden() -> None:
    """Query width below, at and above hidden (record R18)."""
    for hidden, heads, dim in ((1024, 16, 128), (2048, 32, 64), (640, 4, 128), (576, 9, 64)):
        m = parse_config(
            config(
                "qwen3",
                hidden_size=hidden,
                num_attention_heads=heads,
                head_dim=dim,
                num_key_value_heads=1,
            )
        )
        assert (m.q_width, m.kv_width, m.qk_norm) == (heads * dim, dim, True)


def test_families_differ_in_biases_and_norms() -> None:
    """qwen2 has biases on q, k, v; qwen3 norms on heads; llama biases only where it says so."""
    flags = {
        f: (m.qkv_bias, m.o_bias, m.mlp_bias, m.qk_norm)
        for f in ("llama", "mistral", "qwen2", "qwen3")
        for m in (parse_config(config(f)),)
    }
    assert flags == {
        "llama": (False, False, False, False), "mistral": (False, False, False, False),
        "qwen2": (True, False, False, False), "qwen3": (False, False, False, True),
    }  # fmt: skip
    biased = parse_config(config("llama", attention_bias=True, mlp_bias=True))
    assert (biased.qkv_bias, biased.o_bias, biased.mlp_bias) == (True, True, True)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"model_type": "gpt2"}, UnknownName, ("gpt2", "llama, mistral, qwen2, qwen3")),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, UnknownName, ("yarn", "llama3")),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ParseError, ("low_freq",)),
        ({"hidden_act": "gelu"}, UnknownName, ("gelu", "silu")),
        ({"num_key_value_heads": 3}, ParseError, ("4 heads", "3")),
        ({"hidden_size": 0}, ParseError, ("hidden_size",)),
        ({"vocab_size": None}, ParseError, ("vocab_size",)),
        ({"head_dim": 7}, ParseError, ("odd",)),
        ({"partial_rotary_factor": 0.5}, UnknownName, ("partial_rotary_factor",)),
    ],
)
def test_what_is_not_known_is_refused_by_name(
    changes: dict[str, Any], error: type[Exception], words: tuple[str, ...]
) -> None:
    """Never a default in place of something that changes the answer."""
    with pytest.raises(error) as caught:
        parse_config(config(**changes), "some/config.json")
    assert all(w in str(caught.value) for w in ("some/config.json", *words))


def test_both_spellings_of_rotary_parameters_agree() -> None:
    """`rope_theta` with `rope_scaling`, or both within `rope_parameters`."""
    old = config(rope_theta=500000.0, rope_scaling=LLAMA3)
    new = config(rope_parameters={**LLAMA3, "rope_theta": 500000.0})
    del new["rope_theta"]
    assert parse_config(old) == parse_config(new)
    assert parse_config(old).rope.kind is RopeType.LLAMA3


def _formula(theta: float, d: int, scaling: dict[str, Any] | None) -> list[float]:
    out = []
    for i in range(d // 2):
        f = theta ** (-2 * i / d)
        if scaling:
            wave = 2 * math.pi / f
            turns = scaling["original_max_position_embeddings"] / wave
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            if turns < low:
                f /= scaling["factor"]
            elif turns < high:
                s = (turns - low) / (high - low)
                f = (1 - s) * f / scaling["factor"] + s * f
        out.append(f)
    return out


@pytest.mark.parametrize(
    ("theta", "scaling"),
    [(1e4, None), (5e5, None), (1e6, None), (5e5, {**LLAMA3, "factor": 8.0}), (5e5, LLAMA3)],
)
def test_rotary_tables_follow_the_formula_at_every_position(
    theta: float, scaling: dict[str, Any] | None
) -> None:
    """Record R28: frequencies to 1e-12, cosines and sines to 1e-5 up to position 131071."""
    rope = parse_config(config(rope_theta=theta, rope_scaling=scaling)).rope
    want = np.array(_formula(theta, 64, scaling))
    got = inverse_frequencies(rope, 64)
    assert np.allclose(got, want, rtol=1e-12, atol=0)
    if scaling == LLAMA3:  # of 32 frequencies 14 are scaled in full, 3 blended, the rest kept
        plain = np.array(_formula(theta, 64, None))
        assert int(np.isclose(got, plain / 32).sum()) == 14 - 0
        assert int((~np.isclose(got, plain / 32) & ~np.isclose(got, plain)).sum()) == 3
    positions = [0, 1, 4095, 8191, 8192, 29000, 131071]
    cos, sin = rope_table(rope, 64, positions)
    for i, p in enumerate(positions):
        assert np.allclose(cos[i], np.cos(p * want), atol=1e-5)
        assert np.allclose(sin[i], np.sin(p * want), atol=1e-5)


def test_limits_of_a_workload_are_exact() -> None:
    """The limit works, one more is refused with the limit in the text (record R15)."""
    m = parse_config(config(max_position_embeddings=300))
    Workload(MAX_BATCH, 300).check(m)
    for work, word in ((Workload(MAX_BATCH + 1, 300), "8"), (Workload(1, 301), "300")):
        with pytest.raises(UserError, match=word):
            work.check(m)
    for work in (Workload(0, 10), Workload(1, 0)):
        with pytest.raises(UserError):
            work.check(m)
    window = parse_config(config("mistral", sliding_window=128))
    with pytest.raises(UserError, match="128"):
        Workload(1, 129).check(window)
    with pytest.raises(UnknownName, match="fp32, bf16, fp16, int8, w4a16"):
        parse_format("w4")


def test_groups_of_4_bit_weights_are_said_with_their_format() -> None:
    """`w4a16:64`; groups of another size, or of another format, are refused with the known ones."""
    assert parse_weights("w4a16") == (WeightFormat.W4A16, None)
    assert parse_weights("W4A16:64") == (WeightFormat.W4A16, 64)
    assert parse_weights("int8") == (WeightFormat.INT8, None)
    for name in ("w4a16:100", "w4a16:", "fp32:64"):
        with pytest.raises(UserError, match="w4a16:32, w4a16:64, w4a16:128"):
            parse_weights(name)
    with pytest.raises(UserError, match="groups of 48: known sizes are 32, 64, 128"):
        Workload(weights=WeightFormat.W4A16, group=48).check(parse_config(config()))
    work = Workload(weights=WeightFormat.W4A16, group=64, zeros=True)
    assert (work.weight_bytes, work.outer_bytes) == (0.5 + 3 / 64, 2.0)
    assert work.to_json()["group"] == 64


def test_the_heads_format_is_a_choice_beside_4_bit_weights() -> None:
    """16 bits unless int8 is asked for; other weights have it in their own format, or are refused
    with what they have. A plan says so only where it was asked for, and older ones say nothing.
    """
    four, int8 = WeightFormat.W4A16, WeightFormat.INT8
    for name in (None, "16", "fp16", "FP16"):
        assert parse_head(name, four) is None
    assert parse_head("INT8", four) is int8
    assert parse_head("int8", int8) is parse_head("16", WeightFormat.BF16) is None
    for name, form, words in (
        ("int8", WeightFormat.BF16, "head int8 with bf16 .* only w4a16 .* bf16 has it in bf16"),
        ("16", int8, "head 16 with int8 .* int8 has it in int8"),
        ("bf16", four, "head bf16: expected 16 .* or int8"), ("4", four, "expected 16"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=words):
            parse_head(name, form)
    with pytest.raises(UserError, match="head int8 with fp32"):
        Workload(head=int8).check(parse_config(config()))
    work = Workload(2, 30, four, 64, True, int8)
    work.check(parse_config(config()))
    assert (work.outer_bytes, work.head_bytes, work.own_head) == (2.0, 1.0, True)
    assert work.to_json()["head"] == "int8"
    plain = Workload(2, 30, four, 64, True)
    assert (plain.head_bytes, plain.own_head) == (2.0, False)
    for w in (work, plain, Workload(1, 8)):
        assert Workload.from_json(json.loads(json.dumps(w.to_json()))) == w
    assert "head" not in plain.to_json()


def test_a_head_of_its_own_lies_beside_a_tied_embedding() -> None:
    """Both are made of the embedding's tensor, each in its format; a step reads the head alone."""
    m = parse_config(config(tie_word_embeddings=True))
    for head, want in ((None, ["fp16"]), (WeightFormat.INT8, ["fp16", "int8"])):
        work = Workload(weights=WeightFormat.W4A16, head=head)
        shape = StepShape(m, work, Tiling())
        for layout in (weight_layout(shape), cuda_layout(m, work)):
            assert [x.format for x in layout.matrices] == want
            assert {b.tensors for x in layout.matrices for b in x.blocks} == {(EMBED,)}
        assert head_tensor(m, work) == (HEAD if head else EMBED)
    layout = cuda_layout(m, work)
    rows = {x.name: x for x in layout.matrices}
    assert rows["head"].scale_offset >= rows["head"].offset + rows["head"].nbytes
    layers = m.layers * sum(x.nbytes for x in layout.layer_matrices)
    read = layers + rows["head"].nbytes
    assert weight_bytes(m, work) == (read + rows["embed"].nbytes, read)


def test_configuration_reads_back_and_its_digest_follows_every_field(tmp_path: Path) -> None:
    """JSON round trip; each change of a figure changes the digest."""
    base = config("qwen3", eos_token_id=[3, 4], rope_scaling=LLAMA3)
    m = parse_config(base)
    assert ModelConfig.from_json(json.loads(json.dumps(m.to_json()))) == m
    changes: list[dict[str, Any]] = [
        {"hidden_size": 128}, {"num_hidden_layers": 3}, {"num_key_value_heads": 1},
        {"intermediate_size": 97}, {"vocab_size": 260}, {"rms_norm_eps": 1e-5},
        {"tie_word_embeddings": True}, {"rope_theta": 5e5}, {"head_dim": 32}, {"eos_token_id": 3},
    ]  # fmt: skip
    digests = {parse_config({**base, **c}).digest for c in changes}
    assert len(digests | {m.digest}) == len(changes) + 1
    (tmp_path / "config.json").write_text(json.dumps(base))
    assert read_config(tmp_path) == m
    with pytest.raises(UserError, match=r"config\.json"):
        read_config(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ParseError, match="no JSON"):
        read_config(tmp_path)


def test_tied_weights_are_stored_once() -> None:
    """The head of a tied model is the embedding; layers and offsets do not overlap."""
    sizes = {}
    for tied in (True, False):
        m = parse_config(config(tie_word_embeddings=tied))
        layout = weight_layout(StepShape(m, Workload(weights=WeightFormat.INT8), Tiling()))
        assert ("head" in [x.name for x in layout.matrices]) is not tied
        spans = sorted((x.offset, x.offset + x.rows * x.cols_padded) for x in layout.layer_matrices)
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
        assert all(x.offset % 64 == 0 for x in layout.layer_matrices)
        sizes[tied] = layout.total_bytes
    assert sizes[False] - sizes[True] >= 259 * 64
