"""What `obelisk bench --device cuda` does without needing the device for itself, done beforehand.

Takes names (NAME or NAME:BATCH); fills the cache of builds and right answers ($OBELISK_CACHE) with
what the bench will ask for. With `--rivals` it fills torch.compile's caches
($TORCHINDUCTOR_CACHE_DIR, $TRITON_CACHE_DIR): its programs are compiled and run once. What
max-autotune chooses (`--tuned`) is thrown away, since it should choose on an idle device; only its
compiled kernels stay. The bench then mostly races.

    python bench/device_prepare.py gqa gqa:8 lora ...
    python bench/device_prepare.py --rivals gqa gqa:8 lora ...
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from obelisk.app.backends import backend_of
from obelisk.app.bench import CUDA_NAMES
from obelisk.app.contenders_cuda import COMPILED, COMPILED_SDPA, TUNED, contenders
from obelisk.app.loading import load_program
from obelisk.base.errors import ObeliskError
from obelisk.base.settings import settings
from obelisk.ir import Graph
from obelisk.search import Budget, search
from obelisk.tune import Answers, Setup

SEARCH_SECONDS = 6.0
MORE = 40  # lowerings of the fastest candidates' neighbours that the bench may ask for


def graph_of(spec: str) -> Graph:
    """The program in the device's own dtype."""
    name, _, batch = spec.partition(":")
    return load_program(name, batch=int(batch or 1), dtype="f16")


def lowerings(graph: Graph, backend: Any, machine: Any) -> Iterator[Any]:
    """What a bench builds first, in its order, then more choices at neighbouring sizes."""
    found = search(graph, machine, budget=Budget(seconds=SEARCH_SECONDS)).candidates
    pool = [c.graph for c in found]
    near = [s for c in found[1:4] for s in backend.siblings(c.graph, machine)]
    seen: set[str] = set()
    for graphs, most in ((pool + near, backend.most_items), (pool[1:3] + near[:6], MORE)):
        made = choice = 0
        options = {g.digest: backend.options(g, machine) for g in graphs}
        while made < most and choice < max(map(len, options.values()), default=0):
            for g in graphs:
                if choice < len(options[g.digest]) and made < most:
                    try:
                        text = backend.lower(g, machine, options[g.digest][choice])
                    except ObeliskError:
                        continue
                    if text.digest not in seen and (g is graph or not text.slow):
                        seen.add(text.digest)
                        made += 1
                        yield text
            choice += 1


def builds(specs: list[str], seconds: float) -> None:
    """Right answers, and cubins."""
    end = time.monotonic() + seconds
    backend = backend_of("cuda")
    machine = backend.machine("cuda")
    waiting: list[Future[Any]] = []
    with ThreadPoolExecutor(max(1, settings().threads)) as pool, ThreadPoolExecutor(4) as ahead:
        kept = [ahead.submit(lambda g: Answers(g, 0).close(), graph_of(s)) for s in specs]
        build = backend.builder(machine, pool)
        for spec in specs:
            for made in lowerings(graph_of(spec), backend, machine):
                if time.monotonic() < end:
                    waiting.append(build(made))
        while time.monotonic() < end and not all(f.done() for f in (*waiting, *kept)):
            time.sleep(0.1)
        pool.shutdown(wait=False, cancel_futures=True)
    done, right = sum(f.done() for f in waiting), sum(f.done() for f in kept)
    print(f"{done} of {len(waiting)} modules, answers of {right} of {len(kept)}", flush=True)


def rivals(specs: list[str], names: list[str]) -> None:
    """Compile the rivals called `names`, and run each once."""
    import torch

    from obelisk.tune.gpu_worker import DeviceArray
    from obelisk.tune.inputs import input_specs

    for spec in specs:
        graph, begin = graph_of(spec), time.monotonic()
        inputs = [torch.randn(s.shape, device="cuda").half() * 0.1 for s in input_specs(graph)]
        copies = [
            [DeviceArray(t.data_ptr(), s) for t, s in zip(inputs, input_specs(graph), strict=True)]
        ]
        for contender in contenders(graph, names, 60.0)[0]:
            try:
                for call in contender.factory(Setup(copies, 1, contender.payload)):  # type: ignore[operator]
                    call()
                torch.cuda.synchronize()
            except Exception as error:  # the bench will say so
                print(f"{spec}, {contender.name}: {type(error).__name__}: {error}", flush=True)
            torch._dynamo.reset()
        print(f"{spec}: {', '.join(names)} {time.monotonic() - begin:.1f} s", flush=True)


def main() -> None:
    """Fill the caches."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("programs", nargs="*", default=CUDA_NAMES, help="all of the bench's")
    parser.add_argument("--rivals", action="store_true", help="torch.compile")
    parser.add_argument("--tuned", action="store_true", help="max-autotune's kernels")
    parser.add_argument("--seconds", type=float, default=600.0, help="for builds")
    args = parser.parse_args()
    if args.tuned:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
            rivals(args.programs, [TUNED])
    elif args.rivals:
        rivals(args.programs, [COMPILED, *COMPILED_SDPA])
    else:
        builds(args.programs, args.seconds)


if __name__ == "__main__":
    main()
