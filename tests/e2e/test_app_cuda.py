"""`optimize(device="cuda")` on a GPU: right answers, no copies, the caller's stream."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import obelisk as ob
from obelisk.__main__ import main
from obelisk.app.profiling import profile
from obelisk.base.errors import CallError, UserError
from obelisk.ir import Graph, KernelGraph, run

torch: Any = pytest.importorskip("torch", reason="the GPU tests move data with torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device here", allow_module_level=True)

pytestmark = pytest.mark.device
HEADS, ROWS, KEYS, HEAD = 2, 64, 512, 64


def program() -> Graph:
    """An attention that a split over keys serves best: one kernel, counters, scratch memory."""
    g = KernelGraph("attention")
    q = g.input((HEADS, ROWS, HEAD), "f16", name="q")
    k = g.input((HEADS, KEYS, HEAD), "f16", name="k")
    v = g.input((HEADS, KEYS, HEAD), "f16", name="v")
    g.output(g.attention(q, k, v), name="y")
    return g.freeze()


@pytest.fixture(scope="module")
def best(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ob.Compiled]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OBELISK_CACHE", str(tmp_path_factory.mktemp("cuda")))
        yield ob.optimize(program(), device="cuda", budget=20.0)


def tensors(seed: int = 0) -> list[Any]:
    torch.manual_seed(seed)
    shapes = [x.shape for x in program().inputs]
    return [torch.randn(*s, device="cuda", dtype=torch.float16) * 0.5 for s in shapes]


def want(inputs: list[Any]) -> np.ndarray:
    return run(program(), [x.cpu().numpy() for x in inputs])[0]


def close(got: Any, inputs: list[Any]) -> None:
    exact = want(inputs)
    error = np.linalg.norm(got.float().cpu().numpy() - exact) / np.linalg.norm(exact)
    assert error < 2e-3, error


def test_the_answer_is_right_and_fast(best: ob.Compiled) -> None:
    """A found kernel wins over the program's own, is judged, and says how it was measured."""
    inputs = tensors()
    close(best(*inputs), inputs)
    report = best.report
    assert report.chosen.index > 0, report.failures
    assert best.verdict.accepted
    assert report.op_by_op_us is not None
    assert report.chosen.time_us is not None
    assert report.chosen.time_us < report.op_by_op_us
    assert report.floor_us is not None
    assert report.floor_us < report.chosen.time_us
    assert best.baselines["torch"] is not None
    assert not [s for s in report.failures if s in ("crash", "hang", "wrong", "stale")]


def test_results_go_where_they_are_asked_for_and_nothing_is_copied(best: ob.Compiled) -> None:
    """`out` is written; a call without it takes only the result's memory."""
    inputs = tensors(1)
    out = torch.full((HEADS, ROWS, HEAD), float("nan"), device="cuda", dtype=torch.float16)
    assert best(*inputs, out=out) is out
    close(out, inputs)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    kept = best(*inputs)
    torch.cuda.synchronize()
    grown = torch.cuda.memory_allocated() - before
    assert grown <= -(-kept.numel() * 2 // 512) * 512
    with pytest.raises(CallError, match="shares memory with 'q'"):
        best(*inputs, out=inputs[0])


def test_calls_are_on_the_current_stream(best: ob.Compiled) -> None:
    """A call waits for what is ahead of it in its stream, and several streams do not disturb."""
    inputs = tensors(2)
    right = best(*inputs)
    streams = [torch.cuda.Stream() for _ in range(4)]
    fresh = [torch.zeros_like(x) for x in inputs]
    torch.cuda.synchronize()
    with torch.cuda.stream(streams[0]):
        torch.cuda._sleep(20_000_000)  # about ten milliseconds
        for to, source in zip(fresh, inputs, strict=True):
            to.copy_(source)
        late = best(*fresh)
    torch.cuda.synchronize()
    assert torch.equal(late, right)
    sets = [tensors(10 + i) for i in range(4)]
    alone = [best(*s) for s in sets]
    torch.cuda.synchronize()
    for _ in range(25):
        together = []
        for stream, s in zip(streams, sets, strict=True):
            with torch.cuda.stream(stream):
                together.append(best(*s))
        torch.cuda.synchronize()
        for a, b in zip(alone, together, strict=True):
            assert torch.equal(a, b)


def test_calls_are_recorded_in_a_graph(best: ob.Compiled) -> None:
    """Inside torch.cuda.graph: replays read what the inputs hold then; two graphs run at once."""
    inputs = tensors(3)
    best(*inputs)
    graphs, results = [], []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            first = best(*inputs)
            results.append(best(inputs[0] + 0 * first, *inputs[1:]))
        graphs.append(graph)
    for seed in (4, 5):
        for to, source in zip(inputs, tensors(seed), strict=True):
            to.copy_(source)
        torch.cuda.synchronize()
        for graph in graphs:
            with torch.cuda.stream(torch.cuda.Stream()):
                graph.replay()
        torch.cuda.synchronize()
        for got in results:
            close(got, inputs)


def test_repeated_calls_on_the_same_addresses(best: ob.Compiled) -> None:
    """Many calls with one output: each reads what its inputs hold now."""
    inputs, out = tensors(6), torch.empty(HEADS, ROWS, HEAD, device="cuda", dtype=torch.float16)
    for seed in range(6):
        for to, source in zip(inputs, tensors(seed), strict=True):
            to.copy_(source)
        best(*inputs, out=out)
        close(out, inputs)


def test_tensors_that_do_not_match_are_refused(best: ob.Compiled) -> None:
    """R08: on another device, of another dtype, shape, layout or alignment: named, nothing runs."""
    q, k, v = tensors(7)
    with pytest.raises(CallError, match=r"'q' is on cpu, expected cuda: move it with \.cuda\(\)"):
        best(q.cpu(), k, v)
    with pytest.raises(CallError, match="mixed"):
        best(q.cpu().numpy(), k, v)
    with pytest.raises(CallError, match="got numpy arrays"):
        best(*(x.cpu().numpy() for x in (q, k, v)))
    with pytest.raises(CallError, match=r"'q' has dtype torch\.bfloat16, expected torch\.float16"):
        best(q.bfloat16(), k, v)
    with pytest.raises(CallError, match="'k' has shape"):
        best(q, k[:, :-1], v)
    with pytest.raises(CallError, match="'v' has strides"):
        best(q, k, v.transpose(1, 2).contiguous().transpose(1, 2))
    odd = torch.empty(q.numel() + 1, device="cuda", dtype=torch.float16)[1:].view(q.shape)
    with pytest.raises(CallError, match="2 bytes past a multiple of 16"):
        best(odd, k, v)
    with pytest.raises(CallError, match="requires grad"):
        best(q.clone().requires_grad_(), k, v)


def test_recording_a_program_that_never_ran_is_refused(best: ob.Compiled, tmp_path: Path) -> None:
    """Loading kernels cannot be recorded: the error says what to do."""
    fresh = ob.load(best.save(tmp_path / "a.obelisk"))
    inputs = tensors(8)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(CallError, match="call it once before"), torch.cuda.graph(graph):
        fresh(*inputs)
    close(fresh(*inputs), inputs)


def test_export_gives_the_same_bits_in_another_process(best: ob.Compiled, tmp_path: Path) -> None:
    """`save`, then `load` in a new process that imports torch only."""
    saved = best.save(tmp_path / "a.obelisk")
    inputs = tensors(9)
    torch.save([x.cpu() for x in inputs], tmp_path / "in.pt")
    script = (
        "import sys, torch, obelisk as ob\n"
        "best = ob.load(sys.argv[1])\n"
        "xs = [x.cuda() for x in torch.load(sys.argv[2])]\n"
        "torch.save(best(*xs).cpu(), sys.argv[3])\n"
    )
    words = [sys.executable, "-c", script, str(saved), str(tmp_path / "in.pt")]
    subprocess.run([*words, str(tmp_path / "out.pt")], check=True, timeout=120)
    assert torch.equal(torch.load(tmp_path / "out.pt"), best(*inputs).cpu())


def test_profile_accounts_for_the_call(best: ob.Compiled) -> None:
    """Kernel by kernel: times, bytes and occupancy are there and fit the whole."""
    found = profile(best, "cuda", counters=False)
    assert found.kernels
    parts = sum(k.time_us for k in found.kernels)
    assert 0.3 * found.time_us < parts < 3 * found.time_us
    for k in found.kernels:
        assert k.bytes > 0
        assert k.registers > 0
        assert k.occupancy is not None
        assert 0 < k.occupancy <= 1
    with pytest.raises(UserError, match="was built for cuda, and --device is cpu"):
        profile(best, "cpu")


def test_searched_here_tuned_there_without_solver_and_prover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`search -o` for an architecture, `tune` on the device with neither ortools nor egglog."""
    monkeypatch.setenv("OBELISK_CACHE", str(tmp_path / "cache"))
    for name in ("ortools", "egglog", "rustworkx"):
        monkeypatch.setitem(sys.modules, name, None)
    file = tmp_path / "lora.json"
    assert main(["search", "lora", "--dtype", "f16", "--target", "sm_90a", "-o", str(file)]) == 0
    saved = tmp_path / "lora.obelisk"
    words = ["tune", str(file), "--device", "cuda", "--budget", "30s", "--save", str(saved)]
    assert main(words) == 0
    best = ob.load(saved)
    assert best.report.chosen.index > 0
    assert best.verdict.accepted
