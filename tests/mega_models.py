"""Tiny models for the megakernel's tests: configurations, checkpoints, and a reference of our own.

`reference` is plain numpy, written from the formulas of the architectures and sharing no code with
the package: rotary tables, norms, grouped attention and MLP are spelled out once more.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

Array = Any


def config(family: str = "llama", **changes: Any) -> dict[str, Any]:
    """A small `config.json` of a family."""
    base: dict[str, Any] = {
        "model_type": family, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 259, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False, "hidden_act": "silu", "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
    }  # fmt: skip
    if family == "qwen3":
        base["head_dim"] = 24
    return {**base, **changes}


def head_dim(c: dict[str, Any]) -> int:
    """The head's width."""
    return int(c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"])


def random_tensors(c: dict[str, Any], seed: int = 0) -> dict[str, Array]:
    """A checkpoint's tensors, float32, scaled so that logits spread."""
    rng = np.random.default_rng(seed)
    h, f, v, d = c["hidden_size"], c["intermediate_size"], c["vocab_size"], head_dim(c)
    q, kv = c["num_attention_heads"] * d, c["num_key_value_heads"] * d

    def matrix(rows: int, cols: int, gain: float = 1.0) -> Array:
        return (rng.standard_normal((rows, cols)) * gain / math.sqrt(cols)).astype(np.float32)

    def vector(n: int, centre: float, spread: float = 0.2) -> Array:
        return (centre + rng.standard_normal(n) * spread).astype(np.float32)

    out = {
        "model.embed_tokens.weight": matrix(v, h, math.sqrt(h)),
        "model.norm.weight": vector(h, 1.0),
    }
    if not c["tie_word_embeddings"]:
        out["lm_head.weight"] = matrix(v, h, 3.0)
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        a, m = p + "self_attn.", p + "mlp."
        out[p + "input_layernorm.weight"] = vector(h, 1.0)
        out[p + "post_attention_layernorm.weight"] = vector(h, 1.0)
        for name, rows, cols in (("q", q, h), ("k", kv, h), ("v", kv, h), ("o", h, q)):
            out[a + f"{name}_proj.weight"] = matrix(rows, cols, 1.5)
        for name, rows, cols in (("gate", f, h), ("up", f, h), ("down", h, f)):
            out[m + f"{name}_proj.weight"] = matrix(rows, cols, 1.5)
        bias = c["model_type"] == "qwen2" or c.get("attention_bias", False)
        if bias:
            for name, rows in (("q", q), ("k", kv), ("v", kv)):
                out[a + f"{name}_proj.bias"] = vector(rows, 0.0, 0.5)
        if c.get("attention_bias", False) and c["model_type"] in ("llama", "qwen3"):
            out[a + "o_proj.bias"] = vector(h, 0.0, 0.5)
        if c.get("mlp_bias", False):
            for name, rows in (("gate", f), ("up", f), ("down", h)):
                out[m + f"{name}_proj.bias"] = vector(rows, 0.0, 0.5)
        if c["model_type"] == "qwen3":
            out[a + "q_norm.weight"] = vector(d, 1.0)
            out[a + "k_norm.weight"] = vector(d, 1.0)
    return out


def save_model(
    folder: Path, c: dict[str, Any], tensors: dict[str, Array] | None = None, seed: int = 0
) -> dict[str, Array]:
    """Write a model directory; gives its tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    made = random_tensors(c, seed) if tensors is None else tensors
    (folder / "config.json").write_text(json.dumps(c))
    save_file(made, str(folder / "model.safetensors"))
    return made


def _norm(x: Array, gain: Array, eps: float) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * gain


def _frequencies(c: dict[str, Any]) -> Array:
    d, theta = head_dim(c), c.get("rope_theta", 10000.0)
    inv = np.array([1.0 / theta ** (2 * i / d) for i in range(d // 2)])
    scaling = c.get("rope_scaling")
    if not scaling:
        return inv
    if scaling["rope_type"] == "linear":
        return inv / scaling["factor"]
    out = []
    low = scaling["original_max_position_embeddings"] / scaling["low_freq_factor"]
    high = scaling["original_max_position_embeddings"] / scaling["high_freq_factor"]
    for f in inv:
        wave = 2 * math.pi / f
        if wave < high:
            out.append(f)
        elif wave > low:
            out.append(f / scaling["factor"])
        else:
            s = (
                scaling["original_max_position_embeddings"] / wave - scaling["low_freq_factor"]
            ) / (scaling["high_freq_factor"] - scaling["low_freq_factor"])
            out.append((1 - s) * f / scaling["factor"] + s * f)
    return np.array(out)


class Reference:
    """A float64 model that takes one token at a time."""

    def __init__(self, c: dict[str, Any], tensors: dict[str, Array]) -> None:
        self.c = c
        self.w = {k: v.astype(np.float64) for k, v in tensors.items()}
        self.keys: list[list[Array]] = [[] for _ in range(c["num_hidden_layers"])]
        self.values: list[list[Array]] = [[] for _ in range(c["num_hidden_layers"])]
        self.inv = _frequencies(c)

    def _rotate(self, x: Array, at: int) -> Array:
        half = x.shape[-1] // 2
        angle = at * self.inv
        cos, sin = np.cos(angle), np.sin(angle)
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def _linear(self, name: str, x: Array) -> Array:
        y = self.w[name + ".weight"] @ x
        bias = self.w.get(name + ".bias")
        return y if bias is None else y + bias

    def step(self, token: int) -> Array:
        """Logits after `token`."""
        c, d = self.c, head_dim(self.c)
        heads, groups, eps = c["num_attention_heads"], c["num_key_value_heads"], c["rms_norm_eps"]
        x = self.w["model.embed_tokens.weight"][token]
        at = len(self.keys[0])
        for i in range(c["num_hidden_layers"]):
            p = f"model.layers.{i}."
            a = p + "self_attn."
            h = _norm(x, self.w[p + "input_layernorm.weight"], eps)
            q = self._linear(a + "q_proj", h).reshape(heads, d)
            k = self._linear(a + "k_proj", h).reshape(groups, d)
            v = self._linear(a + "v_proj", h).reshape(groups, d)
            if a + "q_norm.weight" in self.w:
                q = _norm(q, self.w[a + "q_norm.weight"], eps)
                k = _norm(k, self.w[a + "k_norm.weight"], eps)
            self.keys[i].append(self._rotate(k, at))
            self.values[i].append(v)
            q = self._rotate(q, at)
            keys, values = np.stack(self.keys[i]), np.stack(self.values[i])
            out = []
            for head in range(heads):
                g = head // (heads // groups)
                scores = keys[:, g] @ q[head] / math.sqrt(d)
                e = np.exp(scores - scores.max())
                out.append(e / e.sum() @ values[:, g])
            x = x + self._linear(a + "o_proj", np.concatenate(out))
            h = _norm(x, self.w[p + "post_attention_layernorm.weight"], eps)
            gate = self._linear(p + "mlp.gate_proj", h)
            up = self._linear(p + "mlp.up_proj", h)
            x = x + self._linear(p + "mlp.down_proj", gate / (1 + np.exp(-gate)) * up)
        h = _norm(x, self.w["model.norm.weight"], eps)
        tied = self.c["tie_word_embeddings"]
        return self.w["model.embed_tokens.weight" if tied else "lm_head.weight"] @ h

    def generate(self, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
        """Greedy tokens, and at each step the gap between the two largest logits."""
        logits = np.zeros(0)
        for token in prompt:
            logits = self.step(token)
        out, gaps = [], []
        for i in range(count):
            top = np.sort(logits)[-2:]
            out.append(int(logits.argmax()))
            gaps.append(float(top[1] - top[0]))
            if i + 1 < count:
                logits = self.step(out[-1])
        return out, gaps
