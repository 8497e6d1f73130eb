"""The plan file and the packing of weights: what is stored reads back, what is damaged is named."""

from __future__ import annotations

import contextlib
import json
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.mega_models import config, random_tensors

from obelisk.app.synth import make_plan
from obelisk.base.errors import ParseError, UserError
from obelisk.machine import host
from obelisk.plan import Plan, host_identity, read_plan, write_plan
from obelisk.plan.layout import MatrixLayout
from obelisk.runtime.packing import pack
from obelisk.schedule import Choice, Sync, place, resources, simulate
from obelisk.tasks import StepShape, Tiling, WeightFormat, Workload, parse_config


def plan_without_compiler(form: WeightFormat = WeightFormat.FP32, panel: int = 4) -> Plan:
    """A plan whose binary is a stand-in: nothing here runs it."""
    c = config("qwen2", hidden_size=44, head_dim=12, intermediate_size=75, vocab_size=131)
    shape = StepShape(parse_config(c), Workload(2, 32, form), Tiling(panel=panel, cores=2))
    schedule = place(shape, Sync.COUNTER)
    machine = host()
    choice = Choice(schedule, simulate(schedule, machine), resources(shape, machine))
    return make_plan(choice, binary=b"not code")


def test_a_plan_reads_back_and_is_stable_byte_for_byte(tmp_path: Path) -> None:
    """Equal plans, equal files; any tool can read the manifest."""
    plan = plan_without_compiler()
    write_plan(plan, tmp_path / "a")
    write_plan(plan_without_compiler(), tmp_path / "b")
    assert read_plan(tmp_path / "a") == plan
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    with zipfile.ZipFile(tmp_path / "a") as archive:
        assert archive.namelist() == ["plan.json", "kernel.c", "kernel.so"]
        data = json.loads(archive.read("plan.json"))
    assert data["workload"] == {"batch": 2, "context": 32, "weights": "fp32"}
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def _rewrite(source: Path, target: Path, name: str, data: bytes) -> None:
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for item in old.namelist():
            new.writestr(item, data if item == name else old.read(item))


def test_damage_is_named(tmp_path: Path) -> None:
    """Every byte range cut or flipped: `ParseError`, never a plan that differs."""
    plan = plan_without_compiler()
    good = tmp_path / "good"
    write_plan(plan, good)
    raw = good.read_bytes()
    bad = tmp_path / "bad"
    for cut in (0, 10, len(raw) // 2, len(raw) - 5):
        bad.write_bytes(raw[:cut])
        with pytest.raises(ParseError):
            read_plan(bad)
    rng = np.random.default_rng(0)
    for at in rng.integers(0, len(raw), 60):
        flipped = bytearray(raw)
        flipped[at] ^= 1 << int(rng.integers(8))
        bad.write_bytes(bytes(flipped))
        with contextlib.suppress(ParseError):
            assert read_plan(bad) == plan  # a bit that no reader looks at
    for name, data, words in (
        ("kernel.so", b"other", "digest of its binary"),
        ("kernel.c", b"int x;", "digest of its source"),
        ("plan.json", b"{}", "format"),
        ("plan.json", b'{"format": "obelisk-plan", "version": 1}', "version 1, .* reads 4"),
        ("plan.json", b'{"format": "obelisk-plan", "version": 4}', "digest"),
        ("plan.json", b"[", "damaged"),
    ):
        _rewrite(good, bad, name, data)
        with pytest.raises(ParseError, match=words):
            read_plan(bad)
    with pytest.raises(UserError, match="obelisk synth"):
        read_plan(tmp_path / "nowhere")


def test_this_host_describes_itself_the_same_way_every_time() -> None:
    """The identity is stable and names something."""
    assert host_identity() == host_identity()
    assert host_identity().title
    assert host_identity().cores >= 1


def test_checkpoints_of_16_bits_are_read(tmp_path: Path) -> None:
    """bf16 and fp16 as float32, where only the runtime is imported; other types by name."""
    header = {
        "a.weight": {"dtype": "BF16", "shape": [1, 3], "data_offsets": [0, 6]},
        "b": {"dtype": "F16", "shape": [2], "data_offsets": [6, 10]},
        "c": {"dtype": "F8_E8M0", "shape": [1], "data_offsets": [10, 11]},
    }
    text = json.dumps(header).encode()
    data = b"\x80\x3f\x00\xc0\x49\x40" + np.array([0.5, -2.0], np.float16).tobytes() + b"\x01"
    (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    code = (
        "import sys\n"
        "from obelisk.base.errors import UserError\n"
        "from obelisk.runtime import Checkpoint\n"
        "c = Checkpoint(sys.argv[1])\n"
        "print(c.tensor('a.weight').tolist(), c.tensor('b').tolist())\n"
        "try: print(c.tensor('c').tolist())\n"
        "except UserError as e: print(e)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.stdout.startswith("[[1.0, -2.0, 3.140625]] [0.5, -2.0]\n"), done.stderr
    assert "c in" in done.stdout
    assert "stored as F8_E8M0; F32, BF16 and F16 are read" in done.stdout


def four_bits(arena: Any, base: int, m: MatrixLayout, r: int, c: int) -> float:
    """A weight out of its word, by the formulas of plan/layout.py."""
    wide = 8 * m.lanes
    at = ((r // m.panel) * (m.cols_padded // wide) + c // wide) * m.panel * m.lanes
    word = int(arena[base + m.offset :].view(np.uint32)[at + r % m.panel * m.lanes + c % m.lanes])
    q = word >> 4 * (c // m.lanes % 8) & 15
    group = (r // m.panel * m.groups + c // m.group) * m.panel + r % m.panel
    scale = arena[base + m.scale_offset :][: 2 * m.rows * m.groups].view(np.float16)[group]
    return (q - 8) * float(scale)


@pytest.mark.parametrize("form", list(WeightFormat))
@pytest.mark.parametrize("panel", [4, 8])
def test_packed_weights_follow_the_documented_formula(form: WeightFormat, panel: int) -> None:
    """index(r, c) of plan/layout.py, for the plain, the grouped and the interleaved matrices."""
    c = config("qwen2", hidden_size=44, head_dim=12, intermediate_size=75, vocab_size=131)
    tensors = random_tensors(c)
    plan = plan_without_compiler(form, panel)
    arena = pack(plan.layout, tensors.__getitem__)
    kinds = {"fp32": np.float32, "bf16": np.uint16, "fp16": np.float16, "int8": np.int8}
    base = plan.layout.layer_offset + plan.layout.layer_bytes  # layer 1
    p = "model.layers.1."
    gate, up = tensors[p + "mlp.gate_proj.weight"], tensors[p + "mlp.up_proj.weight"]
    k = tensors[p + "self_attn.k_proj.weight"]
    matrices = {m.name: m for m in plan.layout.layer_matrices}

    def element(name: str, r: int, col: int) -> float:
        m = matrices[name]
        if m.format == "w4a16":
            return four_bits(arena, base, m, r, col)
        chunk = (r // m.panel) * (m.cols_padded // m.lanes) + col // m.lanes
        at = chunk * m.panel * m.lanes + (r % m.panel) * m.lanes + col % m.lanes
        data = arena[base + m.offset :].view(kinds[m.format])[at]
        if m.format in ("fp32", "fp16"):
            return float(data)
        if m.format == "bf16":
            return float(np.array([int(data) << 16], np.uint32).view(np.float32)[0])
        return float(data) * float(arena[base + m.scale_offset :].view(np.float32)[r])

    tolerances = {"fp32": 0.0, "bf16": 2**-8, "fp16": 2**-11, "int8": 1 / 127, "w4a16": 1 / 7.4}
    tolerance = tolerances[form.value]
    for row, col in ((0, 0), (3, 43), (17, 20), (74, 7)):
        at = row // panel * 2 * panel + row % panel
        for start, source in ((0, gate), (panel, up)):
            got, want = element("up", at + start, col), float(source[row, col])
            assert abs(got - want) <= tolerance * np.abs(source[row]).max()
    d = 12  # head_dim; two query heads, then the key head, of group 1
    group_rows = -(-4 * d // panel) * panel
    got, want = element("qkv", group_rows + 2 * d + 5, 9), float(k[d + 5, 9])
    assert abs(got - want) <= tolerance * np.abs(k[d + 5]).max()
