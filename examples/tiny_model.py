"""Train a tiny language model on this repository's documentation, in numpy, in under a minute.

Run it with `python examples/tiny_model.py [FOLDER]`. It writes a directory as Hugging Face models
have (config.json, tokenizer.json, model.safetensors), which `obelisk synth FOLDER -o PLAN` takes.
The architecture is llama's; the gradients are written out by hand, so that nothing but numpy is
needed. Equal seeds give equal weights on one machine.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

ROOT = Path(__file__).resolve().parents[1]
HIDDEN, LAYERS, HEADS, KV_HEADS, DIM, FFN, VOCAB = 64, 2, 4, 2, 16, 160, 512
BATCH, LENGTH, EPS, THETA = 8, 48, 1e-5, 10000.0


def corpus() -> str:
    """The documentation, as one text."""
    files = sorted((ROOT / "docs").glob("*.md"))
    return "\n\n".join(f.read_text(encoding="utf-8") for f in files)


def train_tokenizer(text: str) -> Tokenizer:
    """A byte-level tokenizer of VOCAB ids: every text has tokens, and decodes to itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, initial_alphabet=alphabet, show_progress=False
    )  # fmt: skip
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer


def initial(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Weights by their names in a checkpoint; the head is the embedding."""

    def matrix(rows: int, cols: int, gain: float = 1.0) -> np.ndarray:
        return (rng.standard_normal((rows, cols)) * gain / np.sqrt(cols)).astype(np.float32)

    w = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN, 0.5)}
    w["model.norm.weight"] = np.ones(HIDDEN, np.float32)
    for i in range(LAYERS):
        p, a, m = (f"model.layers.{i}.{x}" for x in ("", "self_attn.", "mlp."))
        for name in ("input_layernorm", "post_attention_layernorm"):
            w[f"{p}{name}.weight"] = np.ones(HIDDEN, np.float32)
        w[a + "q_proj.weight"] = matrix(HEADS * DIM, HIDDEN)
        w[a + "k_proj.weight"] = matrix(KV_HEADS * DIM, HIDDEN)
        w[a + "v_proj.weight"] = matrix(KV_HEADS * DIM, HIDDEN)
        w[a + "o_proj.weight"] = matrix(HIDDEN, HEADS * DIM, 0.5)
        w[m + "gate_proj.weight"] = matrix(FFN, HIDDEN)
        w[m + "up_proj.weight"] = matrix(FFN, HIDDEN)
        w[m + "down_proj.weight"] = matrix(HIDDEN, FFN, 0.5)
    return w


class Trainer:
    """Forward and backward passes; `grads` holds the gradients of the latest loss."""

    def __init__(self, w: dict[str, np.ndarray]) -> None:
        self.w = w
        self.grads: dict[str, np.ndarray] = {}
        angle = np.outer(np.arange(LENGTH), THETA ** (-np.arange(0, DIM, 2) / DIM))
        kind = w["model.norm.weight"].dtype
        self.cos, self.sin = np.cos(angle).astype(kind), np.sin(angle).astype(kind)
        self.mask = np.triu(np.full((LENGTH, LENGTH), -1e30, kind), 1)

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        """x W^T."""
        return x @ self.w[name].T

    def linear_back(self, name: str, x: np.ndarray, dy: np.ndarray) -> np.ndarray:
        """The gradient of x; that of W is added to `grads`."""
        wide, tall = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
        self.grads[name] = self.grads.get(name, 0) + wide.T @ tall
        return dy @ self.w[name]

    def norm(self, name: str, x: np.ndarray) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
        """RMS norm, and what its gradient needs."""
        r = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + EPS)
        return x * r * self.w[name], (x * r, r)

    def norm_back(
        self, name: str, kept: tuple[np.ndarray, np.ndarray], dy: np.ndarray
    ) -> np.ndarray:
        """The gradient of x."""
        xn, r = kept
        self.grads[name] = (dy * xn).reshape(-1, dy.shape[-1]).sum(0)
        dxn = dy * self.w[name]
        return r * (dxn - xn * (dxn * xn).mean(-1, keepdims=True))

    def turn(self, x: np.ndarray, sign: float = 1.0) -> np.ndarray:
        """Rotary embedding of (..., length, DIM); sign -1 turns back."""
        a, b = x[..., : DIM // 2], x[..., DIM // 2 :]
        n = x.shape[-2]
        cos, sin = self.cos[:n], sign * self.sin[:n]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def heads(self, x: np.ndarray, count: int) -> np.ndarray:
        """(batch, length, count * DIM) as (batch, KV_HEADS, count / KV_HEADS, length, DIM)."""
        b, n, _ = x.shape
        return x.reshape(b, n, KV_HEADS, count // KV_HEADS, DIM).transpose(0, 2, 3, 1, 4)

    def joined(self, x: np.ndarray) -> np.ndarray:
        """The inverse of `heads`."""
        b, g, c, n, d = x.shape
        return x.transpose(0, 3, 1, 2, 4).reshape(b, n, g * c * d)

    def loss(self, ids: np.ndarray, targets: np.ndarray) -> float:
        """Mean cross entropy of targets (batch, length); fills `grads`."""
        self.grads = {}
        e = "model.embed_tokens.weight"
        x = self.w[e][ids]
        tape = []
        for i in range(LAYERS):
            x, kept = self.layer(i, x)
            tape.append(kept)
        h, kept_norm = self.norm("model.norm.weight", x)
        logits = self.linear(e, h)
        logits -= logits.max(-1, keepdims=True)
        p = np.exp(logits)
        p /= p.sum(-1, keepdims=True)
        rows = np.arange(targets.size)
        flat = p.reshape(-1, VOCAB)
        value = float(-np.log(flat[rows, targets.ravel()] + 1e-30).mean())
        flat[rows, targets.ravel()] -= 1
        dx = self.norm_back(
            "model.norm.weight", kept_norm, self.linear_back(e, h, p / targets.size)
        )
        for i in reversed(range(LAYERS)):
            dx = self.layer_back(i, tape[i], dx)
        np.add.at(self.grads[e], ids.ravel(), dx.reshape(-1, HIDDEN))
        return value

    def layer(self, i: int, x: np.ndarray) -> tuple[np.ndarray, tuple]:
        """One decoder layer, and what its gradient needs."""
        p, a, m = (f"model.layers.{i}.{x}" for x in ("", "self_attn.", "mlp."))
        h, n1 = self.norm(p + "input_layernorm.weight", x)
        q = self.turn(self.heads(self.linear(a + "q_proj.weight", h), HEADS))
        k = self.turn(self.heads(self.linear(a + "k_proj.weight", h), KV_HEADS))
        v = self.heads(self.linear(a + "v_proj.weight", h), KV_HEADS)
        n = x.shape[1]
        s = q @ k.swapaxes(-1, -2) / np.sqrt(DIM).astype(x.dtype) + self.mask[:n, :n]
        s = np.exp(s - s.max(-1, keepdims=True))
        s /= s.sum(-1, keepdims=True)
        o = self.joined(s @ v)
        y = x + self.linear(a + "o_proj.weight", o)
        h2, n2 = self.norm(p + "post_attention_layernorm.weight", y)
        g, u = self.linear(m + "gate_proj.weight", h2), self.linear(m + "up_proj.weight", h2)
        z = 1 / (1 + np.exp(-g))
        act = g * z * u
        out = y + self.linear(m + "down_proj.weight", act)
        return out, (h, n1, q, k, v, s, o, h2, n2, g, u, z, act)

    def layer_back(self, i: int, kept: tuple, dout: np.ndarray) -> np.ndarray:
        """The gradient of a layer's input."""
        p, a, m = (f"model.layers.{i}.{x}" for x in ("", "self_attn.", "mlp."))
        h, n1, q, k, v, s, o, h2, n2, g, u, z, act = kept
        dact = self.linear_back(m + "down_proj.weight", act, dout)
        dg = dact * u * z * (1 + g * (1 - z))
        dh2 = self.linear_back(m + "gate_proj.weight", h2, dg)
        dh2 += self.linear_back(m + "up_proj.weight", h2, dact * g * z)
        dy = dout + self.norm_back(p + "post_attention_layernorm.weight", n2, dh2)
        do = self.heads(self.linear_back(a + "o_proj.weight", o, dy), HEADS)
        dv = (s.swapaxes(-1, -2) @ do).sum(2, keepdims=True)
        ds = do @ v.swapaxes(-1, -2)
        ds = s * (ds - (ds * s).sum(-1, keepdims=True)) / np.sqrt(DIM).astype(dout.dtype)
        dq, dk = ds @ k, (ds.swapaxes(-1, -2) @ q).sum(2, keepdims=True)
        dh = self.linear_back(a + "q_proj.weight", h, self.joined(self.turn(dq, -1)))
        dh += self.linear_back(a + "k_proj.weight", h, self.joined(self.turn(dk, -1)))
        dh += self.linear_back(a + "v_proj.weight", h, self.joined(dv))
        return dy + self.norm_back(p + "input_layernorm.weight", n1, dh)


def train(ids: np.ndarray, steps: int, seed: int = 0) -> tuple[dict[str, np.ndarray], list[float]]:
    """Adam with warm-up and a cosine's fall; gives the weights and the losses."""
    rng = np.random.default_rng(seed)
    trainer = Trainer(initial(rng))
    first = {k: np.zeros_like(v) for k, v in trainer.w.items()}
    second = {k: np.zeros_like(v) for k, v in trainer.w.items()}
    losses = []
    for step in range(1, steps + 1):
        at = rng.integers(0, len(ids) - LENGTH - 1, BATCH)
        rows = np.stack([ids[a : a + LENGTH + 1] for a in at])
        losses.append(trainer.loss(rows[:, :-1], rows[:, 1:]))
        rate = 6e-3 * min(1.0, step / 20) * (0.1 + 0.45 * (1 + np.cos(np.pi * step / steps)))
        for k, g in trainer.grads.items():
            first[k] += 0.1 * (g - first[k])
            second[k] += 0.02 * (g * g - second[k])
            top, under = first[k] / (1 - 0.9**step), second[k] / (1 - 0.98**step)
            trainer.w[k] -= (rate * top / (np.sqrt(under) + 1e-8)).astype(np.float32)
    return trainer.w, losses


def main(folder: str | Path = "tiny-model", steps: int = 300) -> list[float]:
    """Train, write the model's directory, and give the losses."""
    start, target = time.perf_counter(), Path(folder)
    text = corpus()
    tokenizer = train_tokenizer(text)
    weights, losses = train(np.array(tokenizer.encode(text).ids), steps)
    config = {
        "model_type": "llama", "hidden_size": HIDDEN, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": DIM,
        "intermediate_size": FFN, "vocab_size": VOCAB, "rms_norm_eps": EPS, "rope_theta": THETA,
        "tie_word_embeddings": True, "hidden_act": "silu", "max_position_embeddings": 512,
    }  # fmt: skip
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(config, indent=1))
    tokenizer.save(str(target / "tokenizer.json"))
    save_file(weights, str(target / "model.safetensors"))
    print(
        f"{target}: {steps} steps, loss {losses[0]:.2f} -> {np.mean(losses[-20:]):.2f} "
        f"in {time.perf_counter() - start:.0f} s"
    )
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:2])
