"""Random small graphs through the whole pipeline: `python -m tests.fuzz --seed N --count 200`.

Each graph ends in a correct result against float64 or in a clean refusal (an `ObeliskError`); no
process may die by a signal or hang. Graphs run in child processes, several to a child; a child that
dies or hangs is a failure of the graph it was at, and the others go on in a new one. Prints a
summary and, for each failure, the command that repeats it. Exit code 1 when anything failed.

`--stage lower` leaves out search, verify and tune: it lowers and builds the plain program, with
lowering options drawn from the seed. `--stage triton` lowers to Triton and runs that in Triton's
interpreter (slow). `--stage interpret` runs our interpreter alone. `--graph S`
runs one graph and says which of its values is the first that is wrong by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from obelisk.base.errors import BuildFailed, InternalError, ObeliskError
from obelisk.ir import Graph, Precision, make_graph, run
from obelisk.ir.text import to_text
from tests.fuzz_graphs import arrays_for, random_program, worst_error

ROOT = Path(__file__).resolve().parents[1]
Result = tuple[list[Any], dict[str, int]]  # outputs, and candidates by their status
STAGES = ("optimize", "lower", "triton", "interpret")
BAD = frozenset({"crash", "hang", "wrong", "incomplete", "overrun", "stale", "unloadable"})


@dataclass(frozen=True)
class Outcome:
    """What came of one graph: "ok" and "refused" are good, all else is a failure."""

    graph: int
    status: str
    detail: str = ""
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        return self.status in ("ok", "refused")


@dataclass(frozen=True)
class Job:
    """How to run graphs."""

    stage: str
    device: str
    budget: float
    cache: str  # where children keep what they build
    patience: float = 120.0  # seconds beyond the budget after which a graph counts as hanging
    starts: float = 60.0  # seconds that a child may take to import what it needs

    @property
    def limit(self) -> float:
        """Seconds after which a graph counts as hanging."""
        return self.budget * 1.1 + self.patience


# --- one graph ------------------------------------------------------------------------------------


def run_interpret(graph: Graph, arrays: list[Any], seed: int, job: Job) -> Result:
    """The graph in its own precision, by the interpreter."""
    return run(graph, arrays, Precision.WORKING), {}


def run_lowered(graph: Graph, arrays: list[Any], seed: int, job: Job) -> Result:
    """The plain program as C or CUDA C++, with lowering options drawn from the seed."""
    if job.device.startswith("cuda"):
        return run_lowered_cuda(graph, arrays, seed)
    from obelisk.build import Library, compile_c
    from obelisk.lower.cpu import CpuOptions, lower_cpu
    from obelisk.machine import host

    rng = random.Random(seed)
    options = CpuOptions(
        rows=rng.choice((6, 6, 4, 1)),
        vectors=rng.choice((2, 2, 1)),
        depth=rng.choice((256, 256, 16)),
        alias=rng.random() < 0.7,
        unroll=rng.choice((4, 1, 2)),
    )
    module = lower_cpu(graph, host(), options)
    if lower_cpu(graph, host(), options).source != module.source:
        raise InternalError("lowering the same graph twice gave two texts")
    built = compile_c(module.source, timeout=60.0)
    # Outputs start as garbage and lie between guards, which must survive.
    guard = 64
    memory = [np.full(o.nbytes + 2 * guard, 0xAB, np.uint8) for o in graph.outputs]
    outs = [
        m[guard : guard + o.nbytes].view(o.dtype.numpy).reshape(o.shape)
        for m, o in zip(memory, graph.outputs, strict=True)
    ]
    Library(built.path, module.scratch_bytes).run(arrays, outs, rng.choice((1, 2)))
    for m in memory:
        if (m[:guard] != 0xAB).any() or (m[-guard:] != 0xAB).any():
            raise InternalError("the kernel wrote outside its output")
    return [o.copy() for o in outs], {}


def run_triton(graph: Graph, arrays: list[Any], seed: int, job: Job) -> Result:
    """The plain program in Triton, with lowering options drawn from the seed."""
    from obelisk.lower.triton import TritonOptions, lower_triton
    from obelisk.machine import find
    from tests.triton_interpreter import Interpreter

    rng = random.Random(seed)
    options = TritonOptions(warps=rng.choice((0, 4, 8)), loop_tile=rng.choice((0, 16, 128)))
    machine = find(rng.choice(("h200", "rtx3090")))
    module = lower_triton(graph, machine, options)
    if lower_triton(graph, machine, options) != module:
        raise InternalError("lowering the same graph twice gave two texts")
    with tempfile.TemporaryDirectory() as folder:
        return Interpreter(Path(folder)).run(module, graph, arrays), {}


def run_lowered_cuda(graph: Graph, arrays: list[Any], seed: int) -> Result:
    """The same for a CUDA device: outputs start as NaNs between guards, and a second call gives
    the first one's bits.
    """
    import torch

    from obelisk.build.cuda import Cubin, compile_cuda_many
    from obelisk.build.device import CudaLibrary
    from obelisk.build.probe import device_facts, machine_of
    from obelisk.lower.cuda import CudaOptions, lower_cuda

    rng, machine, guard = random.Random(seed), machine_of(device_facts()), 256
    options = CudaOptions(
        fragments=rng.random() < 0.8,
        fuse_combine=rng.random() < 0.8,
        stages=rng.choice((0, 0, 2)),
        threads=rng.choice((256, 128)),
    )
    module = lower_cuda(graph, machine, options)
    if lower_cuda(graph, machine, options).digest != module.digest:
        raise InternalError("lowering the same graph twice gave two texts")
    built = compile_cuda_many([k.source for k in module.kernels], machine.arch)
    for answer in built:
        if not isinstance(answer, Cubin):
            raise answer
    torch.zeros(1, device="cuda")
    library = CudaLibrary(module, [b.path for b in built if isinstance(b, Cubin)])
    inputs = [to_device(a) for a in arrays]
    stream = torch.cuda.current_stream().cuda_stream
    scratch = torch.full((library.scratch_bytes + 256,), 255, dtype=torch.uint8, device="cuda")
    library.prepare(scratch.data_ptr(), stream)
    sizes = [-(-int(n.nbytes) // 256) * 256 for n in graph.outputs]
    runs = []
    for _ in range(2):
        outs = [torch.full((s + 2 * guard,), 255, dtype=torch.uint8, device="cuda") for s in sizes]
        library.launch(
            [x.data_ptr() for x in inputs], [o.data_ptr() + guard for o in outs],
            scratch.data_ptr(), stream,
        )  # fmt: skip
        torch.cuda.synchronize()
        runs.append([o.cpu().numpy() for o in outs])
    got = []
    for node, first, second in zip(graph.outputs, *runs, strict=True):
        size = int(node.nbytes)
        if (first[:guard] != 255).any() or (first[guard + size :] != 255).any():
            raise InternalError("the kernel wrote outside its output")
        if not np.array_equal(first, second):
            raise InternalError("two calls on the same inputs gave different bits")
        got.append(first[guard : guard + size].view(node.dtype.numpy).reshape(node.shape))
    for array, tensor in zip(arrays, inputs, strict=True):
        array[...] = from_device(tensor, array.dtype)
    library.close()
    return got, {}


def run_optimized(graph: Graph, arrays: list[Any], seed: int, job: Job) -> Result:
    """The public way: `obelisk.optimize`, then a call; candidates that misbehaved are errors."""
    import obelisk

    best = obelisk.optimize(
        graph, device=job.device, budget=job.budget, seed=seed, cache=False, baselines=()
    )
    on_gpu = job.device.startswith("cuda")
    faults = [c for c in best.report.candidates if c.status.split()[0].lower() in BAD]
    if faults:
        reasons = "; ".join(f"{c.status}: {c.reason}" for c in faults)
        raise InternalError(f"{len(faults)} candidates misbehaved: {reasons}")
    got = best(*(map(to_device, arrays) if on_gpu else arrays))
    outs = list(got) if isinstance(got, tuple) else [got]
    if on_gpu:
        outs = [from_device(x, n.dtype.numpy) for x, n in zip(outs, graph.outputs, strict=True)]
    counts = Counter(c.status for c in best.report.candidates)
    return outs, dict(counts)


def to_device(array: Any) -> Any:
    """A CUDA tensor of torch that lies as the array does, gaps between rows included."""
    import torch

    from obelisk.app.calls import TORCH_NAMES
    from obelisk.ir import DType

    names = {d.numpy: n for d, n in TORCH_NAMES.items()}
    size = array.dtype.itemsize
    strides = [s // size for s in array.strides]
    span = 1 + sum((n - 1) * s for n, s in zip(array.shape, strides, strict=True))
    flat = np.lib.stride_tricks.as_strided(array, (span,), (size,)).copy()
    name = names.get(array.dtype, TORCH_NAMES[DType.I8])  # no tensor of torch holds 4 bits
    raw = torch.from_numpy(flat.view(np.uint8)).cuda()
    return raw.view(getattr(torch, name)).as_strided(array.shape, strides)


def from_device(tensor: Any, dtype: Any) -> Any:
    """A tensor's elements as an array of `dtype`."""
    import torch

    raw = tensor.contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
    return raw.view(dtype).reshape(tuple(tensor.shape))


RUNNERS: dict[str, Callable[[Graph, list[Any], int, Job], Result]] = {
    "interpret": run_interpret,
    "lower": run_lowered,
    "triton": run_triton,
    "optimize": run_optimized,
}


def judge(graph: Graph, seed: int, job: Job) -> tuple[str, str]:
    """Status and detail of one graph. Text that the compiler refuses is a fault, no refusal."""
    arrays = arrays_for(graph, seed)
    logical = [np.array(a) for a in arrays]
    try:
        got, counts = RUNNERS[job.stage](graph, arrays, seed, job)
    except InternalError as error:
        return "internal", str(error)
    except BuildFailed as error:
        return "unbuilt", f"{error}: {Path(error.log).read_text()[:300] if error.log else ''}"
    except ObeliskError as error:
        return "refused", f"{type(error).__name__}: {error}"
    except Exception as error:
        return "error", f"{type(error).__name__}: {error}"
    exact, working = run(graph, logical), run(graph, logical, Precision.WORKING)
    for i, node in enumerate(graph.outputs):
        if got[i].shape != node.shape or got[i].dtype != node.dtype.numpy:
            return "wrong", f"output {i} is {got[i].dtype}{got[i].shape}, expected {node!r}"
        error = worst_error(got[i], exact[i], working[i], node.dtype)
        if error > 1:
            return "wrong", f"output {i} {node!r}: error {error:.3g} times the tolerance"
    for before, after in zip(logical, arrays, strict=True):
        if not np.array_equal(before, np.array(after), equal_nan=True):
            return "wrong", "an input was changed"
    return "ok", json.dumps(counts) if counts else ""


def explain(seed: int, job: Job) -> None:
    """Print the program, its outcome, and the first of its values that is wrong by itself."""
    graph = random_program(seed)
    print(to_text(graph), flush=True)
    print(*judge(graph, seed, job), flush=True)
    for node in graph.nodes:
        if node.inputs:
            alone = make_graph(graph.inputs, [node], graph.input_names, name=f"part_of_{seed}")
            status, detail = judge(alone, seed, job)
            if status not in ("ok", "refused"):
                print(f"first faulty value: {node!r} of {node.inputs}\n  {status}: {detail}")
                print(to_text(alone))
                return


# --- children -------------------------------------------------------------------------------------


def child(seeds: Sequence[int], job: Job) -> None:
    """Run graphs in this process; one line when a graph begins, one when it ends."""
    for seed in seeds:
        print(json.dumps({"begin": seed}), flush=True)
        start = time.monotonic()
        status, detail = judge(random_program(seed), seed, job)
        took = time.monotonic() - start
        line = {"end": seed, "status": status, "detail": detail[:500], "seconds": took}
        print(json.dumps(line), flush=True)


def _lines(stream: Any) -> queue.Queue[str | None]:
    """The stream's lines as they come; None at its end."""
    out: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for line in stream:
            out.put(line)
        out.put(None)

    threading.Thread(target=read, daemon=True).start()
    return out


def child_command(seeds: Sequence[int], job: Job) -> list[str]:
    """What runs some graphs in a process of their own."""
    listed = ",".join(map(str, seeds))
    options = ["--stage", job.stage, "--device", job.device, "--budget", str(job.budget)]
    return [sys.executable, "-m", "tests.fuzz", "--child", listed, *options]


def environment(job: Job) -> dict[str, str]:
    """What children see; Triton decides at import whether it interprets."""
    more = {"TRITON_INTERPRET": "1"} if job.stage == "triton" else {}
    return {**os.environ, "OBELISK_CACHE": job.cache, **more}


def run_batch(
    seeds: Sequence[int],
    job: Job,
    command: Callable[[Sequence[int], Job], list[str]] = child_command,
) -> Iterator[Outcome]:
    """Outcomes of some graphs, in as many children as it takes."""
    left = deque(seeds)
    while left:
        with tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(
                command(left, job), cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True,
                start_new_session=True, env=environment(job),
            )  # fmt: skip
            hung = yield from _follow(process, left, job)
            if left and not hung:  # it ended early: the graph that it was at is to blame
                errors.seek(0)
                code = process.returncode
                name = signal.Signals(-code).name if code < 0 else f"exit {code}"
                yield Outcome(left.popleft(), "died", f"{name}; {errors.read()[-300:]}")


def _follow(
    process: subprocess.Popen[str], left: deque[int], job: Job
) -> Generator[Outcome, None, bool]:
    """Outcomes as a child reports them, taken off `left`; True when it hung and was killed."""
    lines = _lines(process.stdout)
    wait = job.starts
    while True:
        try:
            line = lines.get(timeout=wait)
        except queue.Empty:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            yield Outcome(left.popleft(), "hang", f"nothing for {wait:.0f} s", wait)
            return True
        if line is None:
            process.wait()
            return False
        try:
            said = json.loads(line)
        except ValueError:
            continue  # something printed
        wait = job.limit
        if "end" in said:
            left.popleft()
            yield Outcome(said["end"], said["status"], said["detail"], said["seconds"])


def graph_seeds(seed: int, count: int) -> list[int]:
    """The graphs of a run: different runs share none."""
    return [seed * 1_000_003 + i for i in range(count)]


def fuzz(seed: int, count: int, job: Job, *, size: int = 10, jobs: int = 2) -> list[Outcome]:
    """Outcomes of all graphs of a run, in order; progress goes to stderr."""
    seeds = graph_seeds(seed, count)
    batches = [seeds[i : i + size] for i in range(0, count, size)]
    done: list[Outcome] = []
    lock = threading.Lock()

    def work(batch: Sequence[int]) -> None:
        for outcome in run_batch(batch, job):
            with lock:
                done.append(outcome)
                if sys.stderr.isatty() or not outcome.good or len(done) % 20 == 0:
                    print(f"[{len(done)}/{count}] {outcome.graph} {outcome.status} "
                          f"{outcome.detail[:200]}", file=sys.stderr, flush=True)  # fmt: skip

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(work, batches))
    return sorted(done, key=lambda o: o.graph)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; gives the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the run")
    parser.add_argument("--count", type=int, default=200, help="graphs")
    parser.add_argument("--stage", choices=STAGES, default="optimize")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--budget", type=float, help="seconds of optimize, a graph: 1, or 8 on a GPU unless given"
    )
    parser.add_argument("--batch", type=int, default=10, help="graphs a child process")
    parser.add_argument("--jobs", type=int, default=2, help="child processes at a time")
    parser.add_argument("--graph", type=int, help="run this graph alone, and explain it")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    usual = 8.0 if args.device.startswith("cuda") else 1.0  # a GPU's worker takes seconds to start
    budget = usual if args.budget is None else args.budget
    job = Job(args.stage, args.device, budget, os.environ.get("OBELISK_CACHE", ""))
    if args.child:
        child([int(s) for s in args.child.split(",")], job)
        return 0
    if args.graph is not None:
        explain(args.graph, job)
        return 0
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="obelisk-fuzz-") as cache:
        job = replace(job, cache=cache)
        done = fuzz(args.seed, args.count, job, size=args.batch, jobs=args.jobs)
    counts = Counter(o.status for o in done)
    failures = [o for o in done if not o.good]
    for o in failures:
        print(f"{o.status}: {o.detail}\n  repeat: python -m tests.fuzz --stage {job.stage} "
              f"--device {job.device} --budget {job.budget:g} --graph {o.graph}")  # fmt: skip
    tried: Counter[str] = Counter()
    for o in done:
        if o.status == "ok" and o.detail:
            tried.update(json.loads(o.detail))
    if tried:
        print("candidates: " + ", ".join(f"{n} {s}" for s, n in sorted(tried.items())))
    refusals = Counter(o.detail[:100] for o in done if o.status == "refused")
    for text, n in refusals.most_common(10):
        print(f"refused {n}: {text}")
    parts = ", ".join(f"{n} {status}" for status, n in sorted(counts.items()))
    print(f"{len(done)} graphs: {parts}; {time.monotonic() - start:.0f} s, seed {args.seed}, "
          f"stage {job.stage}")  # fmt: skip
    return 1 if failures or len(done) != args.count else 0


if __name__ == "__main__":
    sys.exit(main())
