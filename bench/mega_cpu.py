"""Time a model's decode step against the machine's read bandwidth and torch, in one run.

    python bench/mega_cpu.py MODEL_DIR [--weights fp32|bf16|int8] [--context N] [--json FILE]

Rows alternate (read, ours, torch eager, read, ...) so that a busy machine hits all alike; the best
round of each is reported, with the load that the machine had.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from obelisk.app.synth import synthesise
from obelisk.base.settings import usable_cores
from obelisk.build import compile_c
from obelisk.runtime import Checkpoint, Session
from obelisk.tasks import ModelConfig, read_config

READ_C = r"""
#define _GNU_SOURCE 1
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
typedef float v __attribute__((vector_size(32)));
typedef struct { const char *p; long n; int cpu; float out; } job;
static void *work(void *arg) {
  job *j = arg;
  v a[8] = {0};
  for (long i = 0; i + 256 <= j->n; i += 256)
    for (int k = 0; k < 8; k++) { v x; memcpy(&x, j->p + i + 32 * k, 32); a[k] += x; }
  for (int k = 1; k < 8; k++) a[0] += a[k];
  j->out = a[0][0];
  return 0;
}
__attribute__((visibility("default")))
float read_all(const char *p, long n, int threads, const int *cpus) {
  pthread_t t[64]; job j[64];
  for (int i = 0; i < threads; i++) {
    pthread_attr_t at; cpu_set_t s;
    pthread_attr_init(&at); CPU_ZERO(&s); CPU_SET(cpus[i], &s);
    pthread_attr_setaffinity_np(&at, sizeof s, &s);
    long a = n / threads / 4096 * 4096;
    j[i] = (job){p + a * i, a, cpus[i], 0};
    pthread_create(&t[i], &at, work, &j[i]);
  }
  float s = 0;
  for (int i = 0; i < threads; i++) { pthread_join(t[i], 0); s += j[i].out; }
  return s;
}
"""


def read_seconds(data: Any, threads: int) -> Callable[[], float]:
    """Times one pass over `data` by pinned threads."""
    entry = ctypes.CDLL(str(compile_c(READ_C).path)).read_all
    entry.restype = ctypes.c_float
    cpus = np.array(sorted(os.sched_getaffinity(0))[:threads], np.int32)

    def run() -> float:
        start = time.perf_counter()
        entry(ctypes.c_void_p(data.ctypes.data), ctypes.c_long(data.nbytes), threads,
              ctypes.c_void_p(cpus.ctypes.data))  # fmt: skip
        return time.perf_counter() - start

    return run


def torch_step(folder: Path, model: ModelConfig, position: int) -> Callable[[], float] | None:
    """Times an eager decode step of the same shapes in torch (None where torch is absent)."""
    try:
        import torch
        import torch.nn.functional as F
    except ImportError:
        return None
    torch.set_num_threads(usable_cores())
    tensors = Checkpoint(folder)
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
             "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm",
             "post_attention_layernorm")  # fmt: skip
    layers = [
        [torch.from_numpy(tensors.tensor(f"model.layers.{i}.{n}.weight")) for n in names]
        for i in range(model.layers)
    ]
    embed = torch.from_numpy(tensors.tensor("model.embed_tokens.weight"))
    head = embed if model.tied else torch.from_numpy(tensors.tensor("lm_head.weight"))
    final = torch.from_numpy(tensors.tensor("model.norm.weight"))
    shape = (1, model.kv_heads, position + 1, model.head_dim)
    keys = [torch.zeros(shape) for _ in layers]
    values = [torch.zeros(shape) for _ in layers]
    cos, sin = torch.rand(model.head_dim), torch.rand(model.head_dim)

    def rotate(x: Any) -> Any:
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat([-b, a], -1) * sin

    @torch.inference_mode()
    def step(token: int) -> int:
        x = embed[token][None]
        for (q, k, v, o, g, u, d, n1, n2), kc, vc in zip(layers, keys, values, strict=True):
            h = F.rms_norm(x, (model.hidden,), n1, model.eps)
            query = rotate(F.linear(h, q).view(1, model.heads, 1, model.head_dim))
            kc[:, :, position] = rotate(F.linear(h, k).view(1, model.kv_heads, 1, -1))[:, :, 0]
            vc[:, :, position] = F.linear(h, v).view(1, model.kv_heads, -1)
            out = F.scaled_dot_product_attention(query, kc, vc, enable_gqa=True)
            x = x + F.linear(out.reshape(1, -1), o)
            h = F.rms_norm(x, (model.hidden,), n2, model.eps)
            x = x + F.linear(F.silu(F.linear(h, g)) * F.linear(h, u), d)
        return int(F.linear(F.rms_norm(x, (model.hidden,), final, model.eps), head).argmax())

    def run() -> float:
        start = time.perf_counter()
        step(1)
        return time.perf_counter() - start

    return run


def main() -> None:
    """Run and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--weights", default="fp32")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--profile", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    made = synthesise(args.model, context=args.context, weights=args.weights, profile=args.profile)
    session, model = Session.load(made.plan), read_config(args.model)
    position, steps = args.context // 2, 4
    read = read_seconds(session.arena, made.plan.cores)
    eager = torch_step(args.model, model, position)
    best = {"read": np.inf, "ours": np.inf, "torch eager": np.inf}
    for _ in range(args.rounds):
        best["read"] = min(best["read"], read())
        session.position[:] = position - steps
        start = time.perf_counter()
        session.launch([[1]], [steps])
        best["ours"] = min(best["ours"], (time.perf_counter() - start) / steps)
        if eager is not None:
            best["torch eager"] = min(best["torch eager"], eager())
    bandwidth = session.arena.nbytes / best["read"]
    kv = 8 * model.layers * model.kv_heads * position * model.head_dim
    moved = session.arena.nbytes + kv
    row = {
        "model": str(args.model), "weights": args.weights, "context": args.context,
        "threads": made.plan.cores, "schedule": made.plan.measured["schedule"],
        "read_GB_s": bandwidth / 1e9, "step_ms": best["ours"] * 1e3,
        "of_read_bandwidth": moved / best["ours"] / bandwidth,
        "torch_eager_ms": best["torch eager"] * 1e3, "load": os.getloadavg()[0],
        "profiled": [[p.note, p.seconds * 1e3] for p in made.profiled],
    }  # fmt: skip
    print(json.dumps(row, indent=1))
    if args.json:
        args.json.write_text(json.dumps(row, indent=1) + "\n")


if __name__ == "__main__":
    main()
