"""What surrounds the CUDA megakernel: loading a plan, and prompts in the kernel and outside it.

    python bench/mega_engine.py checkpoint DIR             # a random one, Llama-3.2-1B's shape
    obelisk synth DIR --device cuda --context 8192 -o PLAN
    python bench/mega_engine.py run PLAN [--json FILE] [--loads N]

A prompt's time is that of `CudaSession.prefill` for one slot, from position 0, as the host sees it:
the median of several runs in one process. The baseline is the kernel's own way, a token a step
without its head.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

LENGTHS = (4, 8, 12, 16, 24, 32, 64, 128, 512, 1024, 4096)
RUNS, KERNEL_RUNS = 9, 3  # the latter for prompts under 1024 tokens, else 1
CONFIG = {
    "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 8192, "vocab_size": 128256,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "hidden_act": "silu",
    "rope_theta": 500000.0, "max_position_embeddings": 131072,
    "rope_scaling": {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip


def checkpoint(folder: Path) -> None:
    """Random weights of that shape in bf16, whose tokens do not repeat."""
    import torch
    from safetensors.torch import save_file

    from obelisk.tasks import checkpoint_tensors, parse_config

    model = parse_config(CONFIG)
    generator = torch.Generator("cuda").manual_seed(1)
    tensors = {}
    for t in checkpoint_tensors(model):
        for layer in range(model.layers) if "{layer}" in t.name else (0,):
            noise = torch.randn(t.shape, generator=generator, device="cuda")
            if len(t.shape) == 2:
                noise *= (13.0 if "embed" in t.name else 1.5) / t.shape[1] ** 0.5
            else:
                noise = 1 + 0.2 * noise
            tensors[t.name.format(layer=layer)] = noise.bfloat16().cpu()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})


def prompts(session: Any, alone: bool) -> list[dict[str, Any]]:
    """Milliseconds of prompts of every length that fits."""
    session.alone, rows = alone, []
    rng = np.random.default_rng(0)
    for length in LENGTHS:
        if length > session.plan.context:
            continue
        tokens = [int(t) for t in rng.integers(0, session.plan.vocab, length)]
        seconds = []
        for _ in range(1 + (RUNS if not alone else KERNEL_RUNS if length < 1024 else 1)):
            session.reset()
            start = time.perf_counter()
            if alone:
                session.prefill([tokens])
            else:
                assert session.outside([tokens])
            seconds.append(1e3 * (time.perf_counter() - start))
        kept = sorted(seconds[1:])
        rows.append({
            "tokens": length, "ms": round(statistics.median(kept), 3), "least": round(kept[0], 3),
            "most": round(kept[-1], 3), "first": round(seconds[0], 3),
        })  # fmt: skip
    return rows


def run(plan: Path, out: Path | None, count: int) -> None:
    """Load `count` times, then prompts."""
    from dataclasses import asdict

    from obelisk.runtime import CudaSession

    loads = []
    for i in range(count):
        session = CudaSession.load(plan)
        loads.append(asdict(session.loaded))
        if i + 1 < count:
            session.close()
    inside = prompts(session, True)
    start = time.perf_counter()
    import torch

    imported = time.perf_counter() - start
    outside = prompts(session, False)
    p = session.plan
    result = {
        "date": str(datetime.date.today()), "command": " ".join(["python", *sys.argv]),
        "machine": p.host.title, "torch": torch.__version__, "model": p.model,
        "workload": p.workload, "weights_bytes": p.layout.total_bytes,
        "step_seconds": p.measured.get("step_seconds"), "loads": loads,
        "import_torch_seconds": imported, "prompt_in_the_kernel": inside,
        "prompt_outside": outside,
    }  # fmt: skip
    print("loads", json.dumps(loads))
    print(f"import torch {imported:.2f} s")
    for a, b in zip(inside, outside, strict=True):
        print(f"{a['tokens']:6d} tokens: kernel {a['ms']:9.2f} ms, outside {b['ms']:8.2f} ms "
              f"({b['least']:.2f} to {b['most']:.2f}, first {b['first']:.1f})")  # fmt: skip
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("checkpoint", "run"))
    parser.add_argument("path", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--loads", type=int, default=2)
    args = parser.parse_args()
    if args.what == "checkpoint":
        checkpoint(args.path)
    else:
        run(args.path, args.json, args.loads)


if __name__ == "__main__":
    main()
