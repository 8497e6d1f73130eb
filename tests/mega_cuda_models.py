"""What the CUDA megakernel's tests share: models of every kind, and a reference that rounds where
the kernel says it rounds.

`Rounded` is `tests.mega_models.Reference` in float64, with inputs of products with 16-bit weights,
keys and values rounded to 16 bits (fp32: not at all); what is left between it and the kernel is the
order of sums and two exponentials in single precision.
"""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np

from obelisk.schedule.gpu import piece_width
from tests.mega_models import Reference, config, head_dim

Array = Any
HEAD8 = "+head8"  # behind a case's weights: the head is int8

MODELS: dict[str, dict[str, Any]] = {
    "llama, groups of 4": config(
        hidden_size=256, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2,
        intermediate_size=512, vocab_size=1000, head_dim=64,
    ),
    "qwen3, 128, groups of 2": config(
        "qwen3", hidden_size=320, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=600, vocab_size=1003, head_dim=128,
    ),
    "qwen2, groups of 7, tied": config(
        "qwen2", hidden_size=896, num_hidden_layers=2, num_attention_heads=14,
        num_key_value_heads=2, intermediate_size=1216, vocab_size=777, tie_word_embeddings=True,
    ),
    "llama, groups of 8, 128": config(
        hidden_size=512, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=1,
        intermediate_size=1056, vocab_size=2051, head_dim=128,
    ),
    "llama, no groups, biases, odd sizes": config(
        hidden_size=108, num_hidden_layers=1, num_attention_heads=3, num_key_value_heads=3,
        intermediate_size=134, vocab_size=259, head_dim=32, attention_bias=True, mlp_bias=True,
    ),
    "qwen3, 24": config("qwen3", num_hidden_layers=3),
}  # fmt: skip


def rounder(form: str) -> Any:
    """A function that rounds float64 arrays to bf16 or fp16 (through float32, as the kernel); fp32:
    leaves them as they are.
    """
    if form == "fp32":
        return np.asarray
    kind = ml_dtypes.bfloat16 if form == "bf16" else np.float16

    def to(x: Array) -> Array:
        return np.asarray(x, np.float32).astype(kind).astype(np.float64)

    return to


class Rounded(Reference):
    """The reference, rounding as the kernel does."""

    def __init__(
        self, c: dict[str, Any], tensors: dict[str, Array], form: str = "bf16", pieces: int = 1
    ) -> None:
        super().__init__(c, tensors)
        self.to, self.form, self.pieces = rounder(form), form, pieces
        self.narrow = form.startswith(("w4a16", "int8"))

    def _normed(self, name: str, x: Array, gain: Array) -> Array:
        """A product of a normed row: the gain before rounding, the root after the product (bf16) or
        before rounding too (fp16); inputs of narrow weights are not rounded.
        """
        root = 1 / math.sqrt(float((x * x).mean()) + self.c["rms_norm_eps"])
        four = self.narrow and (name.endswith("_proj") or self.form.endswith(HEAD8))
        if self.form == "int8" or four:
            y = self.w[name + ".weight"] @ (x * gain) * root
        elif self.form in ("bf16", "fp32"):
            y = self.w[name + ".weight"] @ self.to(x * gain) * root
        else:
            y = self.w[name + ".weight"] @ self.to(x * gain * root)
        bias = self.w.get(name + ".bias")
        return y if bias is None else y + bias

    def _attend(self, e: Array, values: Array) -> Array:
        """Pieces, each rounded, joined."""
        wide = piece_width(len(e), self.pieces)
        out, total = np.zeros(values.shape[1]), 0.0
        for lo in range(0, len(e), wide):
            part = e[lo : lo + wide]
            out += part.sum() * self.to(part @ values[lo : lo + wide] / part.sum())
            total += part.sum()
        return out / total

    def step(self, token: int) -> Array:
        """Logits after `token`."""
        c, d, w, to = self.c, head_dim(self.c), self.w, self.to
        heads, groups, eps = c["num_attention_heads"], c["num_key_value_heads"], c["rms_norm_eps"]
        x = w["model.embed_tokens.weight"][token]
        at = len(self.keys[0])
        for i in range(c["num_hidden_layers"]):
            p = f"model.layers.{i}."
            a, gain = p + "self_attn.", w[p + "input_layernorm.weight"]
            q = self._normed(a + "q_proj", x, gain).reshape(heads, d)
            k = self._normed(a + "k_proj", x, gain).reshape(groups, d)
            v = self._normed(a + "v_proj", x, gain).reshape(groups, d)
            if a + "q_norm.weight" in w:
                q = q / np.sqrt((q * q).mean(-1, keepdims=True) + eps) * w[a + "q_norm.weight"]
                k = k / np.sqrt((k * k).mean(-1, keepdims=True) + eps) * w[a + "k_norm.weight"]
            self.keys[i].append(to(self._rotate(k, at)))
            self.values[i].append(to(v))
            q = self._rotate(q, at)
            keys, values = np.stack(self.keys[i]), np.stack(self.values[i])
            out = []
            for head in range(heads):
                g = head // (heads // groups)
                scores = keys[:, g] @ q[head] / math.sqrt(d)
                out.append(self._attend(np.exp(scores - scores.max()), values[:, g]))
            joined = np.concatenate(out)
            x = x + self._linear(a + "o_proj", joined if self.narrow else to(joined))
            gain = w[p + "post_attention_layernorm.weight"]
            gate = self._normed(p + "mlp.gate_proj", x, gain)
            up = self._normed(p + "mlp.up_proj", x, gain)
            x = x + self._linear(p + "mlp.down_proj", to(gate / (1 + np.exp(-gate)) * up))
        embedding = c["tie_word_embeddings"] and not self.form.endswith(HEAD8)
        name = "model.embed_tokens" if embedding else "lm_head"
        return self._normed(name, x, w["model.norm.weight"])
