"""R50: the documents run as written, the public names stay, and a fresh installation works."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import venv
from pathlib import Path
from types import ModuleType

import pytest

import obelisk as ob
from obelisk.__main__ import main

ROOT = Path(__file__).parents[2]
PUBLIC = {
    "BlockBuilder", "BuildFailed", "CallError", "Compiled", "CompiledFamily", "DType",
    "DTypeError", "Dim", "Family", "FamilyGraph", "Graph", "Infeasible", "InternalError",
    "KernelGraph", "MalformedGraph", "MissingDependency", "Node", "ObeliskError", "ParseError",
    "Precision", "Report", "ShapeError", "UnknownName", "UserError", "Verdict", "VerdictKind",
    "bf16", "bool_", "f16", "f32", "f64", "f8e4m3", "family", "i32", "i4", "i8", "jit", "load",
    "load_program", "optimize", "optimize_family", "random_inputs", "run",
}  # fmt: skip
METHODS = {
    "Compiled": {
        "baselines", "candidates", "graph", "html", "program", "report", "save", "source",
        "verdict",
    },
    "CompiledFamily": {"at", "kernel", "report", "source", "verdict"},
    "Family": {"graph", "prepare", "prepare_family"},
    "Report": {"chosen", "from_cache", "from_json", "op_by_op_us", "sentence", "to_json"},
    "KernelGraph": {
        "abs", "add", "attention", "broadcast", "cast", "clamp", "concat", "const", "div", "erf",
        "exp", "freeze", "gelu", "input", "iota", "layer_norm", "less", "log", "matmul", "maximum",
        "mean", "minimum", "mul", "neg", "output", "reduce_max", "relu", "reshape", "rms_norm",
        "rope", "rsqrt", "sigmoid", "silu", "slice", "softmax", "sqrt", "square", "sub", "sum",
        "tanh", "transpose", "where",
    },
}  # fmt: skip
ARGUMENTS = {
    "optimize": [
        "program", "device", "budget", "seed", "cache", "verify_level", "baselines", "threads",
        "without", "progress",
    ],
    "jit": ["builder", "dims", "options"],
    "optimize_family": ["family", "size", "budget", "seed", "cache", "threads", "progress"],
    "load": ["path"],
    "load_program": ["spec", "batch", "dtype", "like"],
}  # fmt: skip


def blocks(path: Path, language: str) -> list[str]:
    """The fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)


def test_public_names_stay() -> None:
    """Removing or renaming a public name, method or argument fails here first."""
    import inspect

    assert set(ob.__all__) == PUBLIC
    for name in PUBLIC:
        assert getattr(ob, name) is not None
    for name, expected in METHODS.items():
        there = {m for m in dir(getattr(ob, name)) if not m.startswith("_")}
        assert expected <= there, expected - there
    for name, arguments in ARGUMENTS.items():
        assert list(inspect.signature(getattr(ob, name)).parameters) == arguments
    assert re.match(r"\d+\.\d+", ob.__version__)
    with pytest.raises(AttributeError, match="no attribute 'optimise'"):
        _ = ob.optimise


@pytest.mark.usefixtures("compiler")
def test_readme_python_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """The README's Python block, as written; it is the 15 lines that it promises."""
    (code,) = blocks(ROOT / "README.md", "python")
    lines = [line for line in code.splitlines() if line.strip()]
    assert len(lines) <= 15
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    assert "VerdictKind" in capsys.readouterr().out


@pytest.mark.usefixtures("compiler")
def test_readme_commands_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each command of the README's shell block ends with exit code 0."""
    (commands,) = blocks(ROOT / "README.md", "sh")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for line in commands.splitlines():
        name, *words = shlex.split(line)
        assert name == "obelisk"
        words = ["20s" if w == "60s" else w for w in words]  # the same command, a shorter search
        assert main(words) == 0, (line, capsys.readouterr().err)
    assert "</html>" in (tmp_path / "gqa.html").read_text()
    assert "<svg" in (tmp_path / "gqa.svg").read_text()


def test_readme_names_only_what_exists() -> None:
    """Every file that the README links to is there."""
    for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text()):
        assert (ROOT / target).exists(), target


def example(name: str) -> ModuleType:
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.usefixtures("compiler")
def test_example_quickstart() -> None:
    """Right to four digits against float64."""
    assert example("quickstart").main(budget=8.0) < 1e-4


@pytest.mark.usefixtures("compiler")
def test_example_many_shapes() -> None:
    """Every batch's second call costs under a millisecond of overhead and kernel."""
    assert set(example("many_shapes").main(batches=(1, 3))) == {1, 3}


@pytest.mark.usefixtures("compiler")
def test_example_any_batch() -> None:
    """One verdict for all sizes, and every size right to four digits."""
    verdict, worst = example("any_batch").main(batches=(1, 5))
    assert verdict == "proved"
    assert worst < 1e-4


def test_example_judge_a_rewrite() -> None:
    """The right rewrite is accepted, the wrong one refuted."""
    right, wrong = example("judge_a_rewrite").main()
    assert right in ("proved", "tested")
    assert wrong == "refuted"


def test_every_example_is_run_by_a_test() -> None:
    """No example lies there untried (`program.py` is the file that commands are given, and
    `tiny_model.py` is trained in test_mega_trained.py).
    """
    tried = {
        "quickstart", "many_shapes", "any_batch", "judge_a_rewrite", "program", "tiny_model",
    }  # fmt: skip
    assert {p.stem for p in (ROOT / "examples").glob("*.py")} == tried


BARE = """
import sys
import obelisk as ob
g = ob.KernelGraph()
x, w = g.input((4, 8)), g.input((8, 3))
g.output(g.matmul(x, w))
graph = g.freeze()
arrays = ob.random_inputs(graph)
assert ob.run(graph, arrays)[0].shape == (4, 3)
from obelisk.verify import verify
assert verify(graph, graph).accepted
assert not {"torch", "triton", "cuda"} & set(sys.modules), sorted(sys.modules)
try:
    ob.optimize(graph)
except ob.MissingDependency as error:
    assert "apt-get install gcc" in str(error)
else:
    raise SystemExit("there should be no compiler")
print("fine")
"""


def bare_environment(folder: Path) -> dict[str, str]:
    """No PATH, a home with a space in its name, an odd locale."""
    home = folder / "a home"
    home.mkdir(exist_ok=True)
    return {"PATH": str(folder / "nothing"), "HOME": str(home), "LC_ALL": "tr_TR.UTF-8"}


def test_import_interpret_and_verify_without_tools(tmp_path: Path) -> None:
    """With neither GPU nor compiler on the PATH all but compiling works; that says what to do."""
    done = subprocess.run(
        [sys.executable, "-c", BARE],
        env=bare_environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "fine\n", done.stderr


def test_paths_with_spaces_and_odd_locales(compiler: str, tmp_path: Path) -> None:
    """The whole command works in a folder with spaces and umlauts, under a Turkish locale."""
    folder = tmp_path / "ein schöner Ordner"
    folder.mkdir()
    model = folder / "my model.py"
    model.write_text("def f(g):\n    return g.exp(g.input((8, 8)))\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "obelisk", "optimize", str(model), "--budget", "2s"],
        env={**bare_environment(tmp_path), "PATH": os.environ["PATH"],
             "OBELISK_CACHE": str(folder / "my cache"), "OBELISK_CC": compiler},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Chosen graph of f" in done.stdout


@pytest.mark.slow
def test_wheel_in_a_fresh_environment(tmp_path: Path) -> None:
    """Build the wheel, install it into a new environment, and use it there without any tool."""
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    source = tmp_path / "source"
    copy_tree(source)
    subprocess.run([*build, "-w", str(tmp_path), str(source)], check=True, timeout=300)
    (wheel,) = tmp_path.glob("obelisk-*.whl")
    place = tmp_path / "fresh"
    venv.create(place, with_pip=False, system_site_packages=False)
    python = place / "bin" / "python"
    packages = Path(next(p for p in sys.path if p.endswith("site-packages")))
    subprocess.run(
        [sys.executable, "-m", "pip", "--quiet", "--python", str(python), "install", "--no-deps",
         "--no-index", str(wheel)],
        check=True,
        timeout=300,
    )  # fmt: skip
    # The dependencies are those of this environment; obelisk itself is the wheel's.
    (fresh,) = place.glob("lib/python*/site-packages")
    (fresh / "deps.pth").write_text(f"{packages}\n")
    done = subprocess.run(
        [str(python), "-c", "import obelisk; print(obelisk.__file__)\n" + BARE],
        env=bare_environment(tmp_path),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    where, last = done.stdout.strip().splitlines() or ["", ""]
    assert Path(where).is_relative_to(place), done.stderr
    assert last == "fine", done.stderr
    kinds = (".py", ".h", ".j2", ".typed")
    ours = {p.relative_to(ROOT / "src") for p in (ROOT / "src").rglob("*") if p.suffix in kinds}
    assert {p for p in ours if not (fresh / p).is_file()} == set()


def copy_tree(target: Path) -> None:
    """What goes into the wheel, without this checkout's caches."""
    import shutil

    target.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, target / name)
    shutil.copytree(
        ROOT / "src", target / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
    )


def test_readme_table_is_the_measurement() -> None:
    """The README's table is what `bench/readme_table.py` makes of the stored results."""
    sys.path.insert(0, str(ROOT / "bench"))
    try:
        from readme_table import RESULTS, table
    finally:
        sys.path.pop(0)
    import json

    assert table(json.loads(RESULTS.read_text())) in (ROOT / "README.md").read_text()
