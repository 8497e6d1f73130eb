"""The cache key (REPORTS R37): every ingredient that changes the answer changes the key.

Changes exactly one ingredient of a base request at a time (each must miss), and what must not
matter (names, order of construction; each must hit), with real graphs and machines.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from obelisk.base.errors import CacheCorrupt, UserError
from obelisk.cache import CacheKey, Store, budget_class, cache_key
from obelisk.ir import Graph, KernelGraph, random_inputs, run
from obelisk.machine import find
from obelisk.machine.host import host

Request = dict[str, Any]


def gated(
    rows: int = 8,
    hidden: int = 64,
    inner: int = 48,
    dtype: str = "f32",
    axis: int = -1,
    eps: float = 1e-5,
    factor: float = 2.0,
    strides: tuple[int, ...] | None = None,
    outputs: tuple[int, ...] = (0, 1),
    swap: bool = False,
    names: tuple[str, str, str] = ("x", "w1", "w2"),
    late: bool = False,
) -> Graph:
    """silu(n @ w1) * (n @ w2) * factor with n = rms_norm(x), and the norm itself as outputs."""
    g = KernelGraph("gated" if names[0] == "x" else "renamed")
    x = g.input((rows, hidden), dtype, name=names[0], strides=strides)
    w1 = g.input((hidden, inner), dtype, name=names[1])
    w2 = g.input((hidden, inner), dtype, name=names[2])
    if swap:
        w1, w2 = w2, w1
    n = g.rms_norm(x, eps=eps, axis=axis)
    if late:
        right = g.matmul(n, w2)
        left = g.silu(g.matmul(n, w1))
    else:
        left = g.silu(g.matmul(n, w1))
        right = g.matmul(n, w2)
    values = (g.mul(g.mul(left, right), factor), n)
    g.output(*(values[i] for i in outputs))
    return g.freeze()


def request(**changes: Any) -> Request:
    """The base request with some ingredients replaced."""
    base: Request = {
        "program": gated(), "space": "default", "budget_seconds": 60.0, "machine": host(),
        "compiler": "gcc 12.2.0 -O3", "verification": "tested", "device": "cpu",
    }  # fmt: skip
    return {**base, **changes}


def key(**changes: Any) -> CacheKey:
    """The key of the base request with some ingredients replaced."""
    return cache_key(**request(**changes))


MISS: dict[str, Callable[[], CacheKey]] = {
    "rows": lambda: key(program=gated(rows=9)),
    "hidden": lambda: key(program=gated(hidden=63)),
    "inner": lambda: key(program=gated(inner=49)),
    "dtype": lambda: key(program=gated(dtype="f16")),
    "stride": lambda: key(program=gated(strides=(1, 8))),
    "axis": lambda: key(program=gated(axis=0)),
    "eps": lambda: key(program=gated(eps=1e-6)),
    "constant": lambda: key(program=gated(factor=2.0000002)),
    "fewer outputs": lambda: key(program=gated(outputs=(0,))),
    "other output": lambda: key(program=gated(outputs=(1,))),
    "output order": lambda: key(program=gated(outputs=(1, 0))),
    "swapped weights": lambda: key(program=gated(swap=True)),
    "space": lambda: key(space="default, 3 grid dims"),
    "budget class": lambda: key(budget_seconds=61.0),
    "machine arch": lambda: key(machine=replace(host(), arch="x86-64-v9")),
    "machine cores": lambda: key(machine=replace(host(), cores=host().cores + 1)),
    "another machine": lambda: key(machine=find("sm_90")),
    "compiler version": lambda: key(compiler="gcc 12.2.1 -O3"),
    "obelisk version": lambda: replace(key(), obelisk="999.0"),
    "verification off": lambda: key(verification="none"),
    "device": lambda: key(device="cuda:0"),
}
HIT: dict[str, Callable[[], CacheKey]] = {
    "names": lambda: key(program=gated(names=("activations", "gate", "up"))),
    "order of construction": lambda: key(program=gated(late=True)),
    "row-major strides spelled out": lambda: key(program=gated(strides=(64, 1))),
    "dtype alias": lambda: key(program=gated(dtype="float32")),
    "same budget class": lambda: key(budget_seconds=45.0),
    "title of the machine": lambda: key(machine=replace(host(), title="a sticker")),
}


@pytest.mark.parametrize("what", MISS)
def test_changing_one_ingredient_misses(tmp_path: Path, what: str) -> None:
    """Stored under the base request; asked with one change."""
    store = Store.open(tmp_path)
    store.put(key(), {"answer": "base"})
    changed = MISS[what]()
    assert changed.digest != key().digest
    assert store.get(changed) is None


@pytest.mark.parametrize("what", HIT)
def test_changing_what_does_not_matter_hits(tmp_path: Path, what: str) -> None:
    """Names, order of construction and spellings are not part of the question."""
    store = Store.open(tmp_path)
    store.put(key(), {"answer": "base"})
    entry = store.get(HIT[what]())
    assert entry is not None
    assert entry.payload == {"answer": "base"}


def test_swapped_weights_are_other_programs_with_other_results() -> None:
    """R37: fed different tensors the two give different numbers, so they must not share a key."""
    straight, swapped = gated(), gated(swap=True)
    arrays = random_inputs(straight, 3)
    a, b = run(straight, arrays)[0], run(swapped, arrays)[0]
    assert np.abs(a - b).max() > 0.1
    x, w1, w2 = arrays
    np.testing.assert_allclose(run(swapped, [x, w2, w1])[0], a, rtol=1e-12)


def test_every_field_counts() -> None:
    """Also fields that a later version adds: each alone changes the digest."""
    base = key()
    digests = {replace(base, **{f.name: "other"}).digest for f in fields(CacheKey)}
    assert len(digests | {base.digest}) == len(fields(CacheKey)) + 1


def test_fields_do_not_run_into_each_other() -> None:
    """The digest separates neighbouring texts."""
    one, two = replace(key(), space="ab", budget="c"), replace(key(), space="a", budget="bc")
    assert one.digest != two.digest


def test_the_digest_is_the_same_in_another_process() -> None:
    """No hash seed, address or order leaks in."""
    code = (
        f"from obelisk.cache import CacheKey; print(CacheKey.from_json({key().to_json()!r}).digest)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == key().digest


@pytest.mark.parametrize(
    ("seconds", "word"), [(0.2, "1s"), (60, "60s"), (60.1, "120s"), (1e9, "unbounded")]
)
def test_budget_classes(seconds: float, word: str) -> None:
    """The class is the next upper end."""
    assert budget_class(seconds) == word


def test_wrong_ingredients_are_refused() -> None:
    """An empty ingredient would make two different questions equal."""
    with pytest.raises(UserError, match="compiler is ''"):
        key(compiler="")
    with pytest.raises(UserError, match="positive"):
        budget_class(0)
    with pytest.raises(CacheCorrupt, match="not a cache key"):
        CacheKey.from_json({"program": "p"})
