"""The benchmark of a decode step: every row and bar of its JSON, on a tiny model."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from tests.mega_models import config, save_model


def test_ours_is_raced_against_torch_and_the_read_bandwidth(
    tmp_path: Path, compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Record R47 (on a CPU): torch and a plain read of the same bytes in the same run, spreads, and
    "ahead" only where they do not overlap.
    """
    pytest.importorskip("torch", reason="needs torch: pip install -r requirements-torch.lock")
    path = Path(__file__).parents[2] / "bench" / "mega_cpu.py"
    spec = importlib.util.spec_from_file_location("mega_cpu", path)
    assert spec is not None
    assert spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    save_model(tmp_path / "m", config("llama", tie_word_embeddings=True))
    words = ["x", str(tmp_path / "m"), "--weights", "fp32,int8", "--context", "64", "--rounds", "4",
             "--profile", "1", "--torch", "eager", "--json"]  # fmt: skip
    monkeypatch.setattr(sys, "argv", [*words, str(tmp_path / "out.json")])
    bench.main()
    data = json.loads((tmp_path / "out.json").read_text())
    assert {"command", "commit", "processor", "load_before", "load_after"} <= set(
        data["environment"]
    )
    assert [r["weights"] for r in data["results"]] == ["fp32", "int8"]
    for r in data["results"]:
        assert list(r["rows"]) == ["read", "ours", "torch eager"]
        for row in r["rows"].values():
            assert 0 < row["least_ms"] <= row["p10_ms"] <= row["median_ms"] <= row["p90_ms"]
        ahead = r["rows"]["ours"]["p90_ms"] < r["rows"]["torch eager"]["p10_ms"]
        assert r["bars"]["ahead of torch eager"] is ahead
        share = r["of_read_bandwidth_median"]
        assert r["bars"]["85% of the read bandwidth"] is (share >= 0.85)
        rate = r["bytes_of_a_step"] / r["rows"]["ours"]["median_ms"] / 1e6
        assert share == pytest.approx(rate / r["read_GB_s"], rel=1e-6)
