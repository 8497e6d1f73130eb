"""The baseline of bench/mega_cuda.py: one bf16 decode step in torch, compiled, in a CUDA graph.

Takes a model's figures; gives microseconds of a step. Static cache, one position for all slots,
greedy token; the same weights' shapes, head and argmax included.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

REPLAYS = 60
KIND = torch.bfloat16


class Layer(nn.Module):
    """A decoder layer with grouped heads and a gated MLP."""

    def __init__(self, h: int, q: int, kv: int, d: int, f: int, norms: bool, bias: bool) -> None:
        super().__init__()
        self.q, self.kv, self.d = q, kv, d
        self.qkv = nn.Linear(h, (q + 2 * kv) * d, bias=bias)
        self.o = nn.Linear(q * d, h, bias=False)
        self.up, self.down = nn.Linear(h, 2 * f, bias=False), nn.Linear(f, h, bias=False)
        self.norm_in, self.norm_mid = nn.Parameter(torch.ones(h)), nn.Parameter(torch.ones(h))
        self.q_gain = nn.Parameter(torch.ones(d)) if norms else None
        self.k_gain = nn.Parameter(torch.ones(d)) if norms else None

    def forward(self, x: Tensor, at: Tensor, turn: Any, cache: Any, mask: Tensor) -> Tensor:
        """One token of every slot; writes the cache at `at`."""
        rows = self.qkv(F.rms_norm(x, x.shape[-1:], self.norm_in, 1e-6))
        q, k, v = rows.view(x.shape[0], -1, self.d).split([self.q, self.kv, self.kv], 1)
        if self.q_gain is not None:
            q = F.rms_norm(q, (self.d,), self.q_gain, 1e-6)
            k = F.rms_norm(k, (self.d,), self.k_gain, 1e-6)

        def rotate(t: Tensor) -> Tensor:
            a, b = t.chunk(2, -1)
            return (t * turn[0] + torch.cat((-b, a), -1) * turn[1]).to(t.dtype)

        keys, values = cache
        keys.index_copy_(2, at, rotate(k).unsqueeze(2))
        values.index_copy_(2, at, v.unsqueeze(2))
        out = F.scaled_dot_product_attention(
            rotate(q).unsqueeze(2), keys, values, attn_mask=mask, enable_gqa=True
        )
        x = x + self.o(out.reshape(x.shape[0], -1))
        gate, up = self.up(F.rms_norm(x, x.shape[-1:], self.norm_mid, 1e-6)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Model(nn.Module):
    """Embedding, layers, head, argmax."""

    def __init__(self, shape: tuple[Any, ...]) -> None:
        super().__init__()
        layers, h, q, kv, d, f, vocab, norms, bias = shape
        self.embed, self.d = nn.Embedding(vocab, h), d
        self.layers = nn.ModuleList(Layer(h, q, kv, d, f, norms, bias) for _ in range(layers))
        self.norm, self.head = nn.Parameter(torch.ones(h)), nn.Linear(h, vocab, bias=False)

    def forward(
        self, token: Tensor, at: Tensor, caches: list[tuple[Tensor, Tensor]], mask: Tensor
    ) -> Tensor:
        """The next token of every slot."""
        x = self.embed(token)
        steps = torch.arange(0, self.d, 2, device=x.device) / self.d
        angle = at.float() / 1e6**steps
        both = torch.cat((angle, angle))
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, at, (both.cos(), both.sin()), cache, mask)
        return self.head(F.rms_norm(x, x.shape[-1:], self.norm, 1e-6)).argmax(-1)


def replay(step: Any) -> list[float]:
    """Microseconds of graph replays, sorted."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    times = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(True), torch.cuda.Event(True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return sorted(times[5:])


def baseline(shape: tuple[Any, ...], name: str, batch: int, context: int) -> dict[str, Any]:
    """One step at position `context`."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Model(shape)
    model = model.to_empty(device="cuda").to(KIND)
    for p in model.parameters():
        p.data.normal_(0, 0.02)
    layers, _, _, kv, d = shape[:5]
    room = (batch, kv, context + 64, d)
    caches = [
        (torch.randn(room, device="cuda", dtype=KIND), torch.randn(room, device="cuda", dtype=KIND))
        for _ in range(layers)
    ]
    at = torch.tensor([context], device="cuda")
    token = torch.zeros(batch, dtype=torch.long, device="cuda")
    mask = (torch.arange(context + 64, device="cuda") <= context)[None, None, None, :]
    with torch.no_grad():
        torch._dynamo.reset()
        compiled = torch.compile(model, dynamic=False)
        start = time.perf_counter()
        compiled(token, at, caches, mask)
        torch.cuda.synchronize()
        took = time.perf_counter() - start
        times = replay(lambda: compiled(token, at, caches, mask))
    return {
        "spec": f"{name}:{batch}:{context}", "torch_us": round(times[len(times) // 2], 1),
        "least": round(times[0], 1), "most": round(times[-1], 1), "compile_s": round(took, 1),
    }  # fmt: skip
