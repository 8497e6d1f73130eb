"""The named programs on one CUDA device: Obelisk's candidates against what a user would pick.

Every contender runs in one process, many calls with rotated inputs (about 400 MB, beyond any L2)
inside one CUDA graph; figures are medians of replays in microseconds a call, with the quartiles.
Every candidate's output starts as NaN and is compared with float64 first. A program runs in a child
process, so that a kernel that faults is named and skipped.

    python bench/device_subgraphs.py --candidates DIR --out FILE.json gqa_1 lora_1 ...
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROTATION_BYTES = 400e6
MOST_SETS = 64
SEPARATOR = "\n#----\n"
TOLERANCE = 2e-3
QUICK, FULL = 7, 30  # replays
FINALISTS = 4


def rms(torch: Any, x: Any) -> Any:
    return torch.nn.functional.rms_norm(x, (x.shape[-1],))


def attend(torch: Any, q: Any, k: Any, v: Any) -> Any:
    a = torch.exp(q @ k)
    return (a / a.sum(-1, keepdim=True)) @ v


def formula(torch: Any, name: str) -> tuple[Callable[..., Any], float]:
    """The program in torch's idiom, and the scale of its inputs."""
    f = torch.nn.functional
    match name:
        case "gqa" | "mha" | "mqa":
            return (lambda q, k, v: attend(torch, q, k, v)), 0.1
        case "qknorm":
            return (lambda q, k, v: attend(torch, rms(torch, q), k, rms(torch, v))), 0.1
        case "rmsnorm":
            return (lambda x, w: rms(torch, x) @ w), 0.1
        case "ntrans":
            return (lambda h, x, a: rms(torch, x + a * (rms(torch, h) + x))), 0.1
        case "gated_mlp":
            return (lambda x, a, b: f.silu(x @ a) * (x @ b)), 0.1
        case "lora":
            return (lambda x, w, a, b: x @ w + (x @ a) @ b), 0.1
        case "moe":
            return (lambda x, a, b: torch.exp(x @ a) @ b), 0.1
    raise SystemExit(f"no formula for {name}")


def replay_us(torch: Any, record: Callable[[], None], calls: int, reps: int) -> list[float]:
    """Sorted microseconds a call of `reps` replays of what `record` issues."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        record()
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    out = []
    for _ in range(reps):
        begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        out.append(begin.elapsed_time(end) * 1e3 / calls)
    return sorted(out)


def warm(torch: Any, run: Callable[[], None]) -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()


def summary(times: list[float]) -> dict[str, float]:
    n = len(times)
    return {
        "us": round(times[n // 2], 3),
        "low": round(times[n // 4], 3),
        "high": round(times[3 * n // 4], 3),
    }


class Program:
    """One program: its input sets, its reference, and the measurement of contenders."""

    def __init__(self, torch: Any, name: str, graph: Any) -> None:
        self.torch, self.name = torch, name
        self.call, scale = formula(torch, name.rpartition("_")[0])
        shapes = [tuple(x.shape) for x in graph.inputs]
        n = sum(math.prod(s) for s in shapes) * 2
        sets = max(2, min(MOST_SETS, int(ROTATION_BYTES / n) + 1))
        torch.manual_seed(0)
        self.sets = [
            tuple(torch.randn(*s, device="cuda", dtype=torch.float16) * scale for s in shapes)
            for _ in range(sets)
        ]
        self.bytes = n + math.prod(graph.outputs[0].shape) * 2
        self.out = torch.empty(*graph.outputs[0].shape, device="cuda", dtype=torch.float16)
        self.references = [
            self.call(*(x.double() for x in self.sets[i])).double() for i in range(2)
        ]

    def error(self, got: Any, reference: Any) -> float:
        return float((got.double() - reference).norm() / reference.norm())

    def ours(self, library: Any, reps: int) -> dict[str, Any]:
        torch = self.torch
        scratch = torch.empty(library.scratch_bytes + 256, device="cuda", dtype=torch.uint8)
        scratch.fill_(255)
        library.prepare(scratch.data_ptr())
        worst = 0.0
        for _ in range(2):  # twice: counters must be left as they were found
            for i in range(2):
                self.out.fill_(float("nan"))
                library.launch(
                    [x.data_ptr() for x in self.sets[i]], [self.out.data_ptr()],
                    scratch.data_ptr(), torch.cuda.current_stream().cuda_stream,
                )  # fmt: skip
                torch.cuda.synchronize()
                e = self.error(self.out, self.references[i])
                worst = max(worst, e if e == e else math.inf)
        if not worst < TOLERANCE:
            return {"status": "wrong", "error": worst}

        def record() -> None:
            stream = torch.cuda.current_stream().cuda_stream
            for s in self.sets:
                library.launch(
                    [x.data_ptr() for x in s], [self.out.data_ptr()], scratch.data_ptr(), stream
                )

        times = replay_us(torch, record, len(self.sets), reps)
        return {"status": "ok", "error": worst, **summary(times)}

    def rivals(self) -> dict[str, Any]:
        """Eager, torch.compile, and where it applies scaled_dot_product_attention."""
        torch = self.torch
        out: dict[str, Any] = {}

        def measure(label: str, call: Callable[..., Any], sets: Any) -> None:
            try:
                warm(torch, lambda: [call(*s) for s in sets[:2]] and None)
                times = replay_us(torch, lambda: [call(*s) for s in sets] and None, len(sets), FULL)
                error = self.error(call(*sets[0]), self.references[0])
                out[label] = {**summary(times), "error": error}
            except Exception as reason:  # a rival that does not run here is reported, not fatal
                out[label] = {"failed": repr(reason)[:200]}

        measure("eager", self.call, self.sets)
        for mode in ("default", "max-autotune-no-cudagraphs"):
            torch._dynamo.reset()
            compiled = torch.compile(
                self.call, mode=None if mode == "default" else mode, dynamic=False
            )
            measure(f"compile {mode}", compiled, self.sets)
        kind = self.name.rpartition("_")[0]
        if kind in ("gqa", "mha", "mqa", "qknorm"):
            from torch.nn.attention import SDPBackend, sdpa_kernel

            f = torch.nn.functional
            sets = [(q, k.transpose(-1, -2).contiguous(), v) for q, k, v in self.sets]

            def sdpa(q: Any, k: Any, v: Any) -> Any:
                if kind == "qknorm":
                    q, v = rms(torch, q), rms(torch, v)
                return f.scaled_dot_product_attention(q[None], k[None], v[None], scale=1.0)[0]

            for backend in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION"):
                with sdpa_kernel(getattr(SDPBackend, backend)):
                    measure(f"sdpa {backend.split('_')[0].lower()}", sdpa, sets)
                    if kind == "qknorm":
                        torch._dynamo.reset()
                        compiled = torch.compile(sdpa, dynamic=False)
                        measure(f"compile sdpa {backend.split('_')[0].lower()}", compiled, sets)
        return out


def lowered(folder: Path, name: str, limit: int) -> list[tuple[str, Any]]:
    """Distinct modules of the candidates, those with the fewest launches first."""
    from obelisk.base.errors import Infeasible
    from obelisk.ir import text
    from obelisk.lower.cuda import CudaOptions, lower_cuda, variants
    from obelisk.machine import find

    machine = find("h200")
    graphs = [text.parse(t) for t in (folder / f"{name}.txt").read_text().split(SEPARATOR)]
    found: dict[str, tuple[str, Any]] = {}
    for number, graph in enumerate(graphs):
        for options in variants(graph, machine):
            try:
                module = lower_cuda(graph, machine, options)
            except Infeasible:
                continue
            slow = any("in shared memory" in n for n in module.notes)
            if number and slow:
                break
            if not number and options != CudaOptions():
                break
            label = f"{number} {options}" if number else "the program itself"
            found.setdefault(module.digest, (label, module))

    def rank(entry: tuple[str, Any]) -> tuple[bool, int, float]:
        module = entry[1]
        blocks = module.kernels[0].blocks * module.kernels[0].threads
        full = machine.cores * 384
        return (
            entry[0] != "the program itself", len(module.launches), abs(math.log(blocks / full))
        )  # fmt: skip

    return sorted(found.values(), key=rank)[:limit]


def worker(args: argparse.Namespace) -> None:
    """One program, one JSON line per contender."""
    import torch

    from obelisk.build.cuda import Cubin, compile_cuda_many
    from obelisk.build.device import CudaLibrary
    from obelisk.ir import text

    name = args.names[0]
    begun = time.monotonic()
    first = text.parse((Path(args.candidates) / f"{name}.txt").read_text().split(SEPARATOR)[0])
    modules = lowered(Path(args.candidates), name, args.limit)
    lowering = time.monotonic() - begun
    sources = list(dict.fromkeys(k.source for _, m in modules for k in m.kernels))
    begun = time.monotonic()
    cubins = dict(zip(sources, compile_cuda_many(sources, "sm_90a"), strict=True))
    compiling = time.monotonic() - begun
    print(json.dumps({"lowering_s": round(lowering, 2), "compiling_s": round(compiling, 2),
                      "modules": len(modules), "kernels": len(sources)}), flush=True)  # fmt: skip
    program = Program(torch, name, first)
    skip = set(args.skip)
    done: list[tuple[float, str, Any, Any]] = []
    for label, module in modules:
        if label in skip:
            continue
        print(json.dumps({"begin": label}), flush=True)
        built = [cubins[k.source] for k in module.kernels]
        bad = [b for b in built if not isinstance(b, Cubin)]
        if bad:
            print(
                json.dumps({"end": label, "status": "not compiled", "why": str(bad[0])}), flush=True
            )
            continue
        library = CudaLibrary(module, [b.path for b in built])
        got = program.ours(library, QUICK)
        got["kernels"] = [
            {"blocks": k.blocks, "threads": k.threads, "shared": k.shared,
             "registers": b.resources.registers, "spill": b.resources.spill_stores}
            for k, b in zip(module.kernels, built, strict=True)
        ]  # fmt: skip
        print(json.dumps({"end": label, **got}), flush=True)
        if got["status"] == "ok" and label != "the program itself":
            done.append((got["us"], label, library, module))
    done.sort(key=lambda d: d[0])
    for _, label, library, _ in done[:FINALISTS]:
        print(json.dumps({"final": label, **program.ours(library, FULL)}), flush=True)
    if args.rivals:
        for label, row in program.rivals().items():
            print(json.dumps({"rival": label, **row}), flush=True)
    print(json.dumps({"bytes": program.bytes, "sets": len(program.sets)}), flush=True)


def run(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """A program in child processes until every candidate was tried."""
    skip: list[str] = []
    for _ in range(8):
        command = [
            sys.executable, __file__, "--worker", "--candidates", args.candidates,
            "--limit", str(args.limit), *(["--rivals"] if args.rivals else []),
            *(f"--skip={s}" for s in skip), name,
        ]  # fmt: skip
        try:
            child = subprocess.run(
                command, capture_output=True, text=True, timeout=args.timeout, check=False
            )
            printed, said, code = child.stdout, child.stderr, child.returncode
        except subprocess.TimeoutExpired as late:
            printed = (
                (late.stdout or b"").decode()
                if isinstance(late.stdout, bytes)
                else (late.stdout or "")
            )
            said, code = "timed out", -1
        rows = [json.loads(x) for x in printed.splitlines() if x.startswith("{")]
        if code == 0:
            return {"rows": rows, "faults": skip}
        begun = [r["begin"] for r in rows if "begin" in r]
        ended = {r["end"] for r in rows if "end" in r}
        guilty = [b for b in begun if b not in ended]
        print(f"{name}: child ended with {code}: {guilty} {said[-600:]}", flush=True)
        if not guilty:
            return {"rows": rows, "faults": skip, "failed": said[-2000:]}
        skip += guilty
    return {"rows": rows, "faults": skip}


def report(name: str, got: dict[str, Any]) -> None:
    rows = got["rows"]
    head = next((r for r in rows if "lowering_s" in r), {})
    ended = [r for r in rows if "end" in r]
    tally: dict[str, int] = {}
    for r in ended:
        tally[r["status"]] = tally.get(r["status"], 0) + 1
    print(f"== {name} {head} {tally} faults {len(got['faults'])}")
    for r in sorted((r for r in ended if r["status"] == "ok"), key=lambda r: r["us"])[:6]:
        print(f"   {r['us']:8.2f} err {r['error']:.1e} {r['end'][:150]} {r['kernels']}")
    for r in [r for r in ended if r["status"] != "ok"][:3]:
        print(f"   {r['status']} {r.get('error', r.get('why'))} {r['end'][:150]}")
    finals = [r for r in rows if "final" in r and r["status"] == "ok"]
    rivals = [r for r in rows if "rival" in r]
    for r in rivals:
        print(f"   rival {r['rival']}: {r.get('us', r.get('failed'))}")
    if finals:
        best = min(finals, key=lambda r: r["us"])
        line = f"   best {best['us']:.2f} [{best['low']:.2f}, {best['high']:.2f}]"
        good = [r["us"] for r in rivals if "us" in r and r["error"] < 0.02]
        if good:
            line += f", best rival {min(good):.2f}: ratio {min(good) / best['us']:.2f}"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--candidates", required=True)
    parser.add_argument("--limit", type=int, default=60)
    parser.add_argument("--rivals", action="store_true")
    parser.add_argument("--timeout", type=float, default=240.0)
    parser.add_argument("--out")
    parser.add_argument("--worker", action="store_true")
    parser.add_argument("--skip", action="append", default=[])
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return
    results = {}
    for name in args.names:
        results[name] = run(args, name)
        report(name, results[name])
        if args.out:
            Path(args.out).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
