"""Time a model's decode step against the machine's read bandwidth and torch, in one run.

    python bench/mega_cpu.py [MODEL_DIR] [--weights fp32,int8,...] [--context N] [--json FILE]

Without MODEL_DIR: random weights of a shape of 135 million parameters (SmolLM2-135M's), in a
temporary directory. Contenders take turns (read, ours, torch eager, torch.compile, read, ...), so
that a busy machine hits all alike; least, median and 10th and 90th percentiles of the rounds are
reported, with the load that the machine had. The bars: a share of the read bandwidth, by medians;
and ahead of both of torch's in the same run, where nine of ten of our rounds are faster than nine
of ten of theirs. Under four minutes on two idle cores.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from obelisk.app.synth import Synthesis, synthesise
from obelisk.base.settings import usable_cores
from obelisk.build import compile_c
from obelisk.plan import host_identity
from obelisk.runtime import Checkpoint, CpuSession
from obelisk.tasks import ModelConfig, checkpoint_tensors, read_config

SHAPE = {
    "model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49152, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True, "hidden_act": "silu", "rope_theta": 100000.0,
    "max_position_embeddings": 8192,
}  # fmt: skip
BAR = {"fp32": 0.85, "int8": 0.85}  # of the read bandwidth
STEPS = 8  # of one launch
PAUSE = 0.02  # seconds before each row: threads of the one before stop spinning

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
Timer = Callable[[], float]


def write_model(folder: Path) -> None:
    """A model directory of `SHAPE` with random weights."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(SHAPE))
    rng = np.random.default_rng(0)
    tensors = {}
    for t in checkpoint_tensors(read_config(folder)):
        for layer in range(SHAPE["num_hidden_layers"]) if "{layer}" in t.name else (0,):
            w = rng.standard_normal(t.shape, np.float32)
            scale = t.shape[-1] ** -0.5
            tensors[t.name.format(layer=layer)] = w * scale if len(t.shape) > 1 else 1 + w / 10
    save_file(tensors, str(folder / "model.safetensors"))


def read_seconds(data: Any, threads: int) -> Timer:
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


def our_seconds(session: CpuSession, position: int) -> Timer:
    """Times one step of a launch of a few, that ends at `position`."""

    def run() -> float:
        session.position[:] = position - STEPS
        start = time.perf_counter()
        session.launch([[1]], [STEPS])
        return (time.perf_counter() - start) / STEPS

    return run


def torch_seconds(
    folder: Path, model: ModelConfig, position: int, compiled_too: bool
) -> dict[str, Timer]:
    """Times one decode step of the same weights in torch, eager and, if asked for, compiled
    whole; without torch, or where it does not compile, that row is left out with a word on standard
    error.
    """
    try:
        import torch
        import torch.nn.functional as F
    except ImportError:
        print("torch is not installed: no rows of torch", file=sys.stderr)
        return {}
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

    def step(token: Any) -> Any:
        x = embed[token]
        for (q, k, v, o, g, u, d, n1, n2), kc, vc in zip(layers, keys, values, strict=True):
            h = F.rms_norm(x, (model.hidden,), n1, model.eps)
            query = rotate(F.linear(h, q).view(1, model.heads, 1, model.head_dim))
            kc[:, :, position] = rotate(F.linear(h, k).view(1, model.kv_heads, 1, -1))[:, :, 0]
            vc[:, :, position] = F.linear(h, v).view(1, model.kv_heads, -1)
            out = F.scaled_dot_product_attention(query, kc, vc, enable_gqa=True)
            x = x + F.linear(out.reshape(1, -1), o)
            h = F.rms_norm(x, (model.hidden,), n2, model.eps)
            x = x + F.linear(F.silu(F.linear(h, g)) * F.linear(h, u), d)
        return F.linear(F.rms_norm(x, (model.hidden,), final, model.eps), head).argmax(-1)

    def timer(work: Any) -> Timer:
        def run() -> float:
            start = time.perf_counter()
            with torch.inference_mode():
                int(work(token))
            return time.perf_counter() - start

        return run

    token = torch.tensor([1])
    out = {"torch eager": timer(step)}
    if not compiled_too:
        return out
    compiled = timer(torch.compile(step, dynamic=False))
    try:
        for _ in range(2):
            compiled()
        out["torch.compile"] = compiled
    except Exception as error:  # whatever its compilers raise, the other rows stand
        print(f"torch.compile failed: {type(error).__name__}: {error}", file=sys.stderr)
    return out


def spread(seconds: list[float]) -> dict[str, float]:
    """Least, median, 10th and 90th percentiles, in milliseconds."""
    least, low, half, high = (float(x) * 1e3 for x in np.percentile(seconds, [0, 10, 50, 90]))
    return {"least_ms": least, "p10_ms": low, "median_ms": half, "p90_ms": high}


def race(made: Synthesis, model: ModelConfig, theirs: dict[str, Timer], rounds: int) -> Any:
    """One weight format: rows of all contenders, shares, and the bars."""
    session, form = CpuSession.load(made.plan), made.plan.workload["weights"]
    position = made.plan.context // 2
    contenders = {
        "read": read_seconds(session.arena, made.plan.cores),
        "ours": our_seconds(session, position),
        **theirs,
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for timer in contenders.values():
        timer()  # warm
    for i in range(rounds):
        for name, timer in contenders.items():
            # torch's rows are slow: a third of the rounds is enough for them
            if name in ("read", "ours") or i % 3 == 0:
                time.sleep(PAUSE)
                seconds[name].append(timer())
    kv = 8 * model.layers * model.kv_heads * position * model.head_dim
    moved = session.arena.nbytes + kv
    half = {name: float(np.median(s)) for name, s in seconds.items()}
    shares = {
        f"of_read_bandwidth_{word}": float(
            moved / of(seconds["ours"]) * of(seconds["read"]) / session.arena.nbytes
        )
        for word, of in (("median", np.median), ("least", np.min))
    }  # fmt: skip
    ahead = {name: half[name] / half["ours"] for name in theirs}
    rows = {name: spread(s) for name, s in seconds.items()}
    bars = {f"ahead of {name}": rows["ours"]["p90_ms"] < rows[name]["p10_ms"] for name in theirs}
    if form in BAR:
        share = shares["of_read_bandwidth_median"]
        bars[f"{BAR[form]:.0%} of the read bandwidth"] = bool(share >= BAR[form])
    return {
        "weights": form, "threads": made.plan.cores, "position": position,
        "read_GB_s": session.arena.nbytes / half["read"] / 1e9, "bytes_of_a_step": moved,
        "rows": rows, **shares,
        "times_faster_than": ahead, "bars": bars, "tolerance": made.plan.tolerance,
        "schedule": made.plan.measured["schedule"],
        "profiled": [[p.note, p.seconds * 1e3] for p in made.profiled],
    }  # fmt: skip


def environment() -> dict[str, Any]:
    """Where and when this ran, and how busy the machine was."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False,
        cwd=Path(__file__).parent,
    )  # fmt: skip
    return {
        "command": "python bench/mega_cpu.py " + " ".join(sys.argv[1:]),
        "commit": commit.stdout.strip(), "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "processor": host_identity().title, "cores": usable_cores(),
        "avx512_vnni": "avx512_vnni" in host_identity().flags,
        "python": platform.python_version(), "load_before": os.getloadavg()[0],
    }  # fmt: skip


def main() -> None:
    """Run, print a line for each contender, and write one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--weights", default="fp32,int8,bf16,w4a16")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--profile", type=int, default=2)
    parser.add_argument("--torch", choices=("none", "eager", "compile"), default="compile")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    start, about = time.perf_counter(), environment()
    with tempfile.TemporaryDirectory(prefix="obelisk-bench-") as work:
        folder = args.model or Path(work) / "model"
        if args.model is None:
            write_model(folder)
        model = read_config(folder)
        theirs = {}
        if args.torch != "none":
            theirs = torch_seconds(folder, model, args.context // 2, args.torch == "compile")
        results = []
        for form in args.weights.split(","):
            made = synthesise(folder, context=args.context, weights=form, profile=args.profile)
            row = race(made, model, theirs, args.rounds)
            results.append(row)
            print(f"{form}: {row['of_read_bandwidth_median']:.0%} of {row['read_GB_s']:.1f} GB/s")
            for name, s in row["rows"].items():
                figures = " ".join(f"{x:9.2f}" for x in s.values())
                print(f"  {name:14s} {figures} ms")
            for name, held in row["bars"].items():
                print(f"  {'held  ' if held else 'MISSED'} {name}")
    about |= {"load_after": os.getloadavg()[0], "seconds": time.perf_counter() - start}
    print(f"{about['seconds']:.0f} s, load {about['load_before']:.1f} -> {about['load_after']:.1f}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        data = {"environment": about, "model": model.to_json(), "results": results}
        args.json.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
