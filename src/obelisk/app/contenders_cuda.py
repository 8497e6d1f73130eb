"""What Obelisk is compared with on a CUDA device: torch in its ways, and kernel libraries.

Gives the `Contender`s of a program for `tune`, whose worker calls the factories below with tensors
in device memory and records their calls in a CUDA graph. A named program runs in torch's own idiom
(`programs.py`), another one operator by operator (`translate.py`). It promises that what is not
installed, or does not apply, is said so, never silently left out.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from obelisk.app.calls import TORCH_NAMES
from obelisk.app.programs import PROGRAMS, Program, program_of
from obelisk.app.translate import as_torch
from obelisk.ir import Graph, Op
from obelisk.ir.jsonform import from_json, to_json
from obelisk.tune import Contender, Setup

Call = Callable[[], Any]
COMPILE_LIMIT = 180.0  # seconds for torch.compile to compile, and to tune, a program

EAGER, COMPILED, TUNED = "torch", "torch.compile", "torch.compile max-autotune"
SDPA = {
    "sdpa flash": "FLASH_ATTENTION",
    "sdpa cudnn": "CUDNN_ATTENTION",
    "sdpa efficient": "EFFICIENT_ATTENTION",
    "sdpa math": "MATH",
}
COMPILED_SDPA = {"compiled sdpa flash": "sdpa flash", "compiled sdpa efficient": "sdpa efficient"}
LIGER = "liger_kernel.transformers.functional"
LIBRARIES = {"flashinfer": "flashinfer", "liger": "liger_kernel", "quack": "quack"}
QUICK = (EAGER,)  # what `optimize` compares with; the rest is for `bench`
RIVALS = (EAGER, COMPILED, TUNED, *SDPA, *COMPILED_SDPA, *LIBRARIES)
_PLAIN = ("gqa", "mha", "mqa")  # attentions that one call of a library is
SERVED = {  # the programs that a library has a call for
    "flashinfer": _PLAIN,
    "liger": ("rmsnorm", "qknorm", "gated_mlp"),
    "quack": ("rmsnorm", "qknorm"),
}


def contenders(
    graph: Graph, names: Sequence[str], start_seconds: float
) -> tuple[list[Contender], dict[str, str]]:
    """The contenders called `names` for a program, and for those that cannot be: why.

    `start_seconds` limits how long one may take to start; those that compile have `COMPILE_LIMIT`.
    """
    program = program_of(graph)
    plain = all(n.op is not Op.BLOCK for n in graph.nodes)
    absent: dict[str, str] = {}
    found: list[Contender] = []
    for name in names:
        if importlib.util.find_spec("torch") is None:
            absent[name] = "torch is not installed (pip install obelisk[torch])"
        elif not plain:
            absent[name] = "the program has graph-defined kernels"
        elif why := _not_for(name, program):
            absent[name] = why
        else:
            payload = {"program": program.name if program else to_json(graph), "name": name}
            slow = "compile" in name
            limit = COMPILE_LIMIT if slow else max(start_seconds, 20.0)
            found.append(Contender(name, torch_calls, payload, limit, _imports(name)))
    return found, absent


def _imports(name: str) -> tuple[str, ...]:
    """What a contender imports that takes seconds."""
    if name in LIBRARIES:
        return "torch", LIGER if name == "liger" else LIBRARIES[name]
    if name in COMPILED_SDPA or name in (COMPILED, TUNED):
        return "torch", "torch._dynamo", "torch._inductor.compile_fx"
    return ("torch",)


def _not_for(name: str, program: Program | None) -> str:
    """Why a contender does not apply to a program; empty when it does."""
    if name in (EAGER, COMPILED, TUNED):
        return ""
    if name in SDPA or name in COMPILED_SDPA:
        if program is None or program.sdpa is None:
            return "not an attention that the call covers"
        if name in COMPILED_SDPA and program.name in _PLAIN:
            return "nothing beside the call to compile"
        return ""
    if name in LIBRARIES:
        if importlib.util.find_spec(LIBRARIES[name]) is None:
            return "not installed"
        served = SERVED[name]
        if program is None or program.name not in served:
            return "no call for this program"
        return ""
    return f"not known: the contenders are {', '.join(RIVALS)}"


def torch_calls(setup: Setup) -> list[Call]:
    """One call per copy of the inputs, in the way that `payload["name"]` says."""
    import torch  # only the worker that times it needs it

    name, source = setup.payload["name"], setup.payload["program"]
    program = PROGRAMS[source] if isinstance(source, str) else None
    sets = [[_tensor(torch, array) for array in arrays] for arrays in setup.copies]
    with torch.device("cuda"):  # constants of a translated program lie there, too
        call = _idiom(torch, name, program, source)
    sets = [prepared(name, program, tensors) for tensors in sets]
    if name in (COMPILED, TUNED) or name in COMPILED_SDPA:
        mode = "max-autotune-no-cudagraphs" if name == TUNED else None
        call = torch.compile(call, dynamic=False, mode=mode)
    kind = SDPA.get(COMPILED_SDPA.get(name, name))

    def run(tensors: Sequence[Any]) -> Any:
        with torch.inference_mode():
            if kind is None:
                return call(*tensors)
            from torch.nn.attention import SDPBackend, sdpa_kernel

            with sdpa_kernel(getattr(SDPBackend, kind)):
                return call(*tensors)

    return [partial(run, tensors) for tensors in sets]


def _idiom(torch: Any, name: str, program: Program | None, source: Any) -> Callable[..., Any]:
    """The program as a function of tensors."""
    if program is None:
        return as_torch(from_json(source), torch)
    if name in LIBRARIES:
        return _library(torch, name, program)
    if program.sdpa is not None and (name in SDPA or name in COMPILED_SDPA):
        return partial(program.sdpa, torch)
    return partial(program.torch, torch)


def prepared(name: str, program: Program | None, tensors: list[Any]) -> list[Any]:
    """Inputs laid out as a call wants them, at no charge: the named programs hold K transposed, and
    FlashInfer has the tokens in front.
    """
    if program is None or "k" not in program.shapes:
        return tensors
    q, k, v = tensors
    transposed = program.shapes["k"][1] < program.shapes["k"][2]  # (heads, dim, keys)
    if name == "flashinfer":
        keys = k.permute(2, 0, 1) if transposed else k.transpose(0, 1)
        return [x.contiguous() for x in (q.transpose(0, 1), keys, v.transpose(0, 1))]
    if transposed and (name in SDPA or name in COMPILED_SDPA):
        return [q, k.transpose(-1, -2).contiguous().transpose(-1, -2), v]
    return tensors


def _library(torch: Any, name: str, program: Program) -> Callable[..., Any]:
    """The program through a kernel library: its attention, its norm or its gate, with torch's
    products.
    """
    if name == "flashinfer":
        flashinfer = import_module("flashinfer")

        def attend(q: Any, k: Any, v: Any) -> Any:
            got = flashinfer.single_prefill_with_kv_cache(q, k, v, sm_scale=1.0)
            return got.transpose(0, 1)

        return attend
    gains: dict[tuple[int, Any], Any] = {}  # of ones: made once, in the warm-up

    def gain(x: Any, dtype: Any) -> Any:
        key = (x.shape[-1], dtype)
        if key not in gains:
            gains[key] = torch.ones(x.shape[-1], dtype=dtype, device=x.device)
        return gains[key]

    if name == "liger":
        liger = import_module(LIGER)
        if program.name == "gated_mlp":
            return lambda x, w1, w2: liger.liger_swiglu(x @ w1, x @ w2)

        def norm(x: Any) -> Any:
            return liger.liger_rms_norm(x, gain(x, x.dtype), 0.0)
    else:
        quack = import_module("quack")

        def norm(x: Any) -> Any:
            return quack.rmsnorm(x, gain(x, torch.float32))

    if program.name == "rmsnorm":
        return lambda x, w: norm(x) @ w
    return lambda q, k, v: PROGRAMS["gqa"].torch(torch, norm(q), k, norm(v))


def _tensor(torch: Any, array: Any) -> Any:
    """A tensor on a worker's device memory, without a copy."""
    spec = array.spec
    flat = torch.as_tensor(array, device="cuda").view(getattr(torch, TORCH_NAMES[spec.dtype]))
    if spec.strides is None:
        return flat.reshape(spec.shape)
    return flat.as_strided(spec.shape, spec.strides)
