"""The process that Triton's compiler runs in: a program of its own, not a module of Obelisk.

Reads a list of jobs (JSON) from standard input; for each writes `kernel.cubin` into the job's
folder and one line to standard output, a JSON object behind MARK: what the kernel needs, or why
there is none. Run with `python -P`, so that no file beside this one is taken for the library.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

MARK = "obelisk:"
USAGE_SECONDS = 20.0


def usage(cubin: Path) -> str:
    """What the disassembler that comes with Triton says of registers and stack; "" without it."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.is_file():
        return ""
    done = subprocess.run(
        [str(tool), "-res-usage", str(cubin)], capture_output=True, text=True,
        timeout=USAGE_SECONDS, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return done.stdout + done.stderr


def compiled(function: Any, job: dict[str, Any], stages: int) -> Any:
    """One run of the compiler."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = function.arg_names
    pointers = names[: len(job["pointers"])]
    signature = {n: "*" + t for n, t in zip(pointers, job["pointers"], strict=True)}
    signature |= {n: "constexpr" for n in names[len(pointers) :]}
    constants = {(i,): job["early"] for i in range(len(pointers), len(names))}
    aligned = {(i,): [["tt.divisibility", 16]] for i, yes in enumerate(job["aligned"]) if yes}
    source = ASTSource(function, signature, constants, aligned)
    return triton.compile(
        source,
        target=GPUTarget("cuda", job["capability"], 32),
        options={"num_warps": job["warps"], "num_stages": stages},
    )


def build(job: dict[str, Any]) -> dict[str, Any]:
    """Compile one kernel, with fewer stages where its shared memory does not fit."""
    folder = Path(job["folder"])
    spec = importlib.util.spec_from_file_location(f"kernel_{folder.name}", folder / "kernel.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, job["entry"])
    stages = job["stages"]
    while True:
        kernel = compiled(function, job, stages)
        facts = kernel.metadata
        if facts.shared <= job["shared_limit"] or stages == 1:
            break
        stages -= 1
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    return {
        "shared": facts.shared, "warps": facts.num_warps, "stages": stages,
        "scratch": facts.global_scratch_size, "usage": usage(cubin),
    }  # fmt: skip


def main() -> None:
    """All jobs, one after the other; a failure ends none of the others."""
    jobs = json.load(sys.stdin)
    import triton.compiler  # here, so that no job's time limit counts it

    print(MARK + json.dumps({"version": triton.__version__}), flush=True)
    for job in jobs:
        try:
            answer = build(job)
        except BaseException as error:  # the compiler raises of every kind; the parent counts them
            answer = {"error": f"{type(error).__name__}: {error}", "log": traceback.format_exc()}
            if isinstance(error, KeyboardInterrupt):
                raise
        print(MARK + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
