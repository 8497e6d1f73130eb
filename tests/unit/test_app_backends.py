"""Back ends, machines of devices, and the commands around them, where there is no GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests import fake_cuda
from tests.cuda_graphs import attention, fused

from obelisk.__main__ import main
from obelisk.app import backends
from obelisk.app.backends import backend_of, ordinal_of
from obelisk.app.bench import BenchRow, bench_json, summarise
from obelisk.app.building import cuda_target, exceeded
from obelisk.app.calls import Signature
from obelisk.app.chart import chart
from obelisk.app.contenders_cuda import RIVALS, contenders
from obelisk.app.loading import load_for, load_program, target_dtype
from obelisk.app.profiling import launch_alone, launch_bytes, parse_ncu
from obelisk.app.report import BaselineRow, CandidateRow, Report, SearchRow
from obelisk.app.request import restricted
from obelisk.app.sizing import neighbours
from obelisk.base.errors import CallError, Infeasible, MissingDependency, UnknownName, UserError
from obelisk.build.cuda import Cubin, Resources, toolchain
from obelisk.build.probe import device_facts, machine_of
from obelisk.ir import DType, KernelGraph, random_inputs, run
from obelisk.ir.resize import blocks_of
from obelisk.lower.cuda import CudaKernel, lower_cuda
from obelisk.lower.triton import TritonOptions
from obelisk.machine import capacity, find
from obelisk.search import Budget, search
from obelisk.tune import CPU
from obelisk.verify import Verifier

KIB = 1024
ROOT = Path(__file__).parents[2]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> fake_cuda.Driver:
    """A driver that tells of an H200."""
    return fake_cuda.install(lambda name, made: monkeypatch.setitem(sys.modules, name, made))


def test_devices_name_their_back_end() -> None:
    """One registration each; what is not known is named with what is."""
    assert backend_of("host") is backend_of("cpu")
    assert backend_of("cuda:3") is backend_of("cuda")
    assert backend_of("cpu").rig("cpu") is CPU
    assert backend_of("cuda:3").rig("cuda:3").ordinal == 3
    assert ordinal_of("cuda") == 0
    for wrong in ("cpu:1", "cuda:x", "tpu", "h200"):
        with pytest.raises(UnknownName, match=r"cpu.*cuda:N"):
            backend_of(wrong)


def test_a_further_back_end_is_one_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module with `BACKEND` and one line in the registry: the device's name finds it."""

    class Abacus:
        name = "abacus"

    module: Any = type(sys)("abacus_backend")
    module.BACKEND = Abacus()
    monkeypatch.setitem(sys.modules, "abacus_backend", module)
    monkeypatch.setattr(backends, "_REGISTRY", {**backends._REGISTRY, "abacus": "abacus_backend"})
    assert backend_of("abacus").name == "abacus"


def test_named_programs_are_of_the_devices_dtype() -> None:
    """f32 on a CPU, f16 on a GPU, what is asked for anywhere."""
    assert load_for("lora", "cpu").inputs[0].dtype is DType.F32
    assert load_for("lora", "cuda").inputs[0].dtype is DType.F16
    assert load_for("lora", "cuda", dtype="bf16").inputs[0].dtype is DType.BF16
    assert target_dtype("lora", "sm_90a", None) is DType.F16
    assert target_dtype("lora", "cpu", None) is None
    assert target_dtype("some.json", "sm_90a", None) is None


def test_the_machine_is_what_the_driver_says(device: fake_cuda.Driver) -> None:
    """R35: limits come from the device; a device with other figures is another machine."""
    facts = device_facts()
    assert facts.name == "NVIDIA H200"
    known = machine_of(facts)
    assert known.name == "h200"
    assert (known.shared_bytes, known.cores) == (227 * KIB, 132)
    assert known.bandwidth == find("h200").bandwidth
    for shared in (48, 64, 99, 163, 227):
        other = machine_of(replace(facts, name="NVIDIA X", shared_bytes=shared * KIB, cores=66))
        assert other.shared_bytes == shared * KIB
        assert other.peak(DType.F16) == pytest.approx(find("h100").peak(DType.F16) / 2, rel=0.1)
        assert other.digest != known.digest
    with pytest.raises(UnknownName, match=r"compute capability 7\.5"):
        machine_of(replace(facts, capability=(7, 5)))
    with pytest.raises(UserError, match="cuda:5: this machine has 1 CUDA devices"):
        device_facts(5)


@pytest.mark.parametrize("shared", [48, 99, 227])
def test_no_candidate_exceeds_the_devices_shared_memory(shared: int) -> None:
    """R35: whatever the device has, what is found fits it, and attention has a fused form."""
    machine = replace(find("h200"), name=f"mock{shared}", shared_bytes=shared * KIB)
    graph = load_program("gqa", dtype="f16")
    found = search(graph, machine, budget=Budget(seconds=20), workers=1)
    blocks = [b for c in found.candidates for b in blocks_of(c.graph)]
    assert blocks
    assert all(capacity(b, machine) is None for b in blocks)
    for candidate in found.candidates[1:4]:
        for kernel in lower_cuda(candidate.graph, machine).kernels:
            assert kernel.shared <= shared * KIB


def test_without_bindings_or_device_the_error_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, device: fake_cuda.Driver
) -> None:
    """No driver library, no device: refused with the way out."""

    def nothing(_: int) -> Any:
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    device.cuInit = nothing  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"libcuda.*obelisk tune FILE --device cuda"):
        device_facts()
    for name in ("cuda", "cuda.bindings", "cuda.bindings.driver"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingDependency, match=r"obelisk\[cuda\]"):
        device_facts()


def test_siblings_are_the_same_program_at_other_sizes() -> None:
    """Other grids and loops, each once, all of them equal to the program by the judges."""
    machine = find("h200")
    graph = load_program("rmsnorm", dtype="f16")
    found = search(graph, machine, budget=Budget(seconds=20), workers=1).candidates[1].graph
    near = neighbours(found, machine)
    assert len({g.digest for g in near} | {found.digest}) == len(near) + 1
    grids = [blocks_of(g)[0].grid for g in near]
    assert len(set(grids)) >= 3
    verifier = Verifier(graph)
    assert all(verifier.verify(g).accepted for g in near[:6])


@pytest.mark.parametrize("name", ["moe", "mha"])
def test_siblings_of_kernels_that_combine_parts_are_right(name: str) -> None:
    """Experts and heads, one a block, of which a sibling has two: its second kernel must not take
    them for parts of a sum. Four of moe's siblings did, and 22 of mha's had half the results.
    """
    machine = find("h200")
    graph = load_program(name, dtype="f16")
    found = search(graph, machine, budget=Budget(seconds=20), workers=1).candidates
    split = next(c.graph for c in found if "second kernel" in c.note)
    near = neighbours(split, machine)
    verdicts = {str(blocks_of(g)[0].grid): Verifier(graph).verify(g) for g in near}
    assert [(k, v.witness or v.bound) for k, v in verdicts.items() if not v.accepted] == []
    first = blocks_of(split)[0].grid[0]
    assert any(blocks_of(g)[0].grid[0] < first for g in near), "some have several a block"


def test_decisions_that_are_left_out() -> None:
    """Each ablation changes every choice; equal choices are one; what there is not is named."""
    backend = backend_of("cuda")
    graph = load_program("lora", dtype="f16")
    options = backend.options(graph, find("h200"))
    for name, change in backend.ablations.items():
        left = restricted(backend, options, (name,))
        assert left
        assert len(set(left)) == len(left)
        assert all(getattr(o, k) == v for o in left for k, v in change.items())
    with pytest.raises(UserError, match=r"'magic'.*layout"):
        restricted(backend, options, ("magic",))
    # A target that takes no such decision would hide what it brings.
    known = [*options, TritonOptions()]
    assert TritonOptions() in restricted(backend, known, ())
    assert not any(isinstance(o, TritonOptions) for o in restricted(backend, known, ("layout",)))


@pytest.mark.parametrize("name", sorted(backend_of("cuda").ablations))
def test_each_decision_changes_kernels(name: str) -> None:
    """Leaving a decision out gives other text for some fused graph: the flag is not for show."""
    backend, machine = backend_of("cuda-c"), find("sm_90a")
    changed = 0
    for graph in (
        *fused().values(),
        attention(2, 256, 4096, 64, row_tile=64, split=4, key_tile=64),
    ):
        for choice in backend.options(graph, machine):
            (other,) = restricted(backend, [choice], (name,))
            if other == choice:
                continue
            try:
                digests = {backend.lower(graph, machine, o).digest for o in (choice, other)}
            except Infeasible:
                continue
            changed += len(digests) == 2
            if changed:
                return
    pytest.fail(f"--no-{name} never changes a kernel")


def test_signatures_of_a_device_refuse_what_lies_elsewhere() -> None:
    """numpy arrays and CPU tensors do not fit a program on a device."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    g = KernelGraph("line")
    g.output(g.input((8, 64), "f16", name="x") * 2.0, name="y")
    signature = Signature(g.freeze(), "cuda")
    x = torch.zeros(8, 64, dtype=torch.float16)
    with pytest.raises(CallError, match="runs on a CUDA device, got numpy arrays"):
        signature.bind([x.numpy()])
    with pytest.raises(CallError, match=r"'x' is on cpu, expected cuda: move it with \.cuda\(\)"):
        signature.bind([x])


def test_rivals_that_do_not_apply_are_named() -> None:
    """Every rival is either a contender or has its reason."""
    for name in ("gqa", "lora", "qknorm"):
        found, absent = contenders(load_program(name, dtype="f16"), RIVALS, 20.0)
        assert {c.name for c in found} | set(absent) == set(RIVALS)
        assert not {c.name for c in found} & set(absent)
        assert all(absent.values())
        assert ("sdpa flash" in absent) == (name == "lora")


def report(time_us: float | None, others: dict[str, float | None]) -> Report:
    """A bench's report of one program."""
    rows = (
        CandidateRow(0, 3, 10, 9.0, 20.0, 0.1, "proved", "", "ok"),
        CandidateRow(1, 1, 10, 5.0, time_us, 0.1, "proved", "", "ok", chosen=True),
    )
    baselines = tuple(BaselineRow(n, t, 0.1) for n, t in {"op_by_op": 20.0, **others}.items())
    return Report(
        "p", "d", "h200", 0, 1.0, 1.0, rows, baselines, SearchRow(), {}, {}, {}, floor_us=2.0
    )


def test_bench_compares_with_whoever_was_fastest() -> None:
    """Ratios are of the best rival in the same run; the chart shows the same figures."""
    rows = [
        BenchRow("gqa", 8, "f16", report(10.0, {"torch": 30.0, "sdpa flash": 15.0})),
        BenchRow("lora", 1, "f16", report(4.0, {"torch": 8.0, "sdpa flash": None})),
        BenchRow("moe", 1, "f16", None, "Infeasible: no"),
    ]
    assert rows[0].best_other == ("sdpa flash", 15.0)
    assert rows[0].name == "gqa:8"
    assert summarise(rows)["geomean_all"] == pytest.approx(3**0.5)
    data = bench_json(rows)
    assert data["rows"][0]["floor_us"] == 2.0
    assert data["rows"][0]["best_other_us"] == 15.0
    picture = chart(rows)
    assert picture.startswith("<svg")
    assert "gqa:8  1.50x" in picture
    assert "lora  2.00x" in picture
    assert "Without a comparison: moe" in picture
    assert chart(rows) == picture


def test_readme_table_of_the_device_is_the_measurement() -> None:
    """The README's table is what `bench/readme_table.py` makes of the stored results."""
    sys.path.insert(0, str(ROOT / "bench"))
    try:
        from readme_table import CUDA_RESULTS, cuda_table
    finally:
        sys.path.pop(0)
    assert CUDA_RESULTS
    files = [json.loads(x.read_text()) for x in CUDA_RESULTS]
    assert cuda_table(files) in (ROOT / "README.md").read_text()


def test_readme_table_of_the_megakernel_is_the_measurement() -> None:
    """The README's table is what `bench/mega_table.py` makes of the stored results."""
    sys.path.insert(0, str(ROOT / "bench"))
    try:
        from mega_table import MARKS, runs, table
    finally:
        sys.path.pop(0)
    readme = (ROOT / "README.md").read_text()
    assert MARKS[0] + table(runs()) + MARKS[1] in readme


def test_counters_of_ncu_are_read_with_their_units() -> None:
    """Names, units, values; preambles and counters that a device lacks are passed over."""
    text = (
        "==PROF== Connected\n"
        '"ID","Kernel Name","gpu__time_duration.sum","dram__bytes_read.sum",'
        '"sm__throughput.avg.pct_of_peak_sustained_elapsed","other"\n'
        '"","","ns","Mbyte","%",""\n'
        '"0","k","9,984","2.5","41.5","1"\n'
        '"1","k","12000","n/a","7","1"\n'
    )
    first, second = parse_ncu(text)
    assert first == {"ncu_us": pytest.approx(9.984), "dram_read_bytes": 2.5e6, "sm_percent": 41.5}
    assert "dram_read_bytes" not in second
    assert parse_ncu("==ERROR== nothing") == []


def test_bytes_of_launches_add_up() -> None:
    """Inputs and outputs count whole, tensors between kernels up to the next one."""
    graph = load_program("lora", dtype="f16")
    sizes = launch_bytes(graph, lower_cuda(graph, find("h200")))
    assert sum(sizes) > sum(n.nbytes for n in (*graph.inputs, *graph.outputs))
    assert all(n > 0 for n in sizes)


def test_launches_alone_compute_the_same() -> None:
    """A launch as a program of its own: its inputs are the tensors that it reads."""
    g = KernelGraph("small")
    x = g.input((4, 8), name="x")
    g.output(g.mul(g.exp(x), 0.5))
    graph = g.freeze()
    value = random_inputs(graph, 0)
    for launch in graph.launches():
        alone = launch_alone(launch)
        (got,) = run(alone, value)
        value = [got]
    assert got == pytest.approx(run(graph, random_inputs(graph, 0))[0])


def cuda_compiler() -> bool:
    try:
        toolchain()
    except MissingDependency:
        return False
    return True


needs_compiler = pytest.mark.skipif(not cuda_compiler(), reason="no NVRTC and no nvcc here")


@needs_compiler
def test_build_writes_source_cubin_and_table(
    tmp_path: Path, fresh_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a GPU: every kernel's text and cubin, and what the compiler says it uses."""
    out, data = tmp_path / "out", tmp_path / "b.json"
    words = ["build", "ntrans", "--target", "sm_90a", "-o", str(out), "--json", str(data)]
    assert main(words) == 0
    table = json.loads(data.read_text())
    assert table == json.loads((out / "resources.json").read_text())
    assert table["arch"] == "sm_90a"
    for row in table["kernels"]:
        assert row["status"] == "ok"
        assert row["registers"] > 0
        assert (out / row["folder"] / f"kernel{row['kernel']}.cu").read_text()
        cubin = (out / row["folder"] / f"kernel{row['kernel']}.cubin").read_bytes()
        assert cubin.startswith(b"\x7fELF")
    assert "are good" in capsys.readouterr().out


@needs_compiler
def test_build_takes_what_a_search_wrote(tmp_path: Path, fresh_cache: Path) -> None:
    """Candidates of a file, each a folder of its own."""
    file, out = tmp_path / "c.json", tmp_path / "out"
    words = ["search", "ntrans", "--target", "sm_90a", "--workers", "1", "-o", str(file)]
    assert main(words) == 0
    stored = json.loads(file.read_text())
    stored["candidates"] = stored["candidates"][:2]
    file.write_text(json.dumps(stored))
    assert main(["build", str(file), "--target", "sm_90a", "-o", str(out)]) == 0
    folders = {r["folder"] for r in json.loads((out / "resources.json").read_text())["kernels"]}
    assert folders == {"00-00", "01-00"}


def test_build_refuses_targets_without_cubins() -> None:
    """A CPU is no target of `build`; an unknown machine is named."""
    with pytest.raises(UserError, match=r"--target cpu.*sm_90a"):
        cuda_target("cpu")
    with pytest.raises(UnknownName, match="sm_75"):
        cuda_target("sm_75")


def test_tuning_elsewhere_needs_neither_solver_nor_prover(
    tmp_path: Path, fresh_cache: Path
) -> None:
    """A search's file, tuned by a process that cannot import ortools, egglog or rustworkx."""
    file, data = tmp_path / "c.json", tmp_path / "t.json"
    assert main(["search", "ntrans", "--budget", "3s", "--workers", "1", "-o", str(file)]) == 0
    script = (
        "import sys\n"
        "for name in ('ortools', 'egglog', 'rustworkx'): sys.modules[name] = None\n"
        "from obelisk.__main__ import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    words = ["tune", str(file), "--budget", "6s", "--json", str(data)]
    done = subprocess.run(
        [sys.executable, "-c", script, *words], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(data.read_text())
    assert report["chosen"]["verdict"] in ("proved", "tested")
    assert any("found for" in note for note in report["notes"])


def test_limits_are_those_of_the_machine() -> None:
    """Shared memory, registers and threads by the compiler's figures."""
    machine = find("sm_90a")

    def over(shared: int, registers: int, threads: int) -> str:
        kernel = CudaKernel("k", "", 1, threads, shared)
        return exceeded(
            kernel, Cubin(Path(), 0.0, Resources(registers, 0, 0, 0, 100), False), machine
        )

    assert over(1000, 64, 256) == ""
    assert "bytes of shared memory, 232448 fit" in over(232400, 64, 256)
    assert "registers, an SM has 65536" in over(0, 255, 512)
    assert "a block has at most 1024" in over(0, 16, 2048)
