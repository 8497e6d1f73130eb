"""One search and one proof for every batch size: a family of programs along a symbolic dim.

Run it with `python examples/any_batch.py`. The structure is searched once; a new size only chooses
tiles, in milliseconds, and is compiled when it is first called.
"""

import numpy as np

import obelisk as ob


def block(g: ob.KernelGraph, batch: int) -> ob.Node:
    """rms_norm(x), projected, for any number of rows."""
    x, w = g.input((batch, 256), name="x"), g.input((256, 384), name="w")
    return g.matmul(g.rms_norm(x, eps=1e-6), w)


def main(batches: tuple[int, ...] = (1, 5, 64)) -> tuple[str, float]:
    """Give the verdict for all sizes, and the worst relative error that was seen."""
    family = ob.optimize_family(ob.family(block, batch=(1, 64)), budget=30.0)
    print(f"{family.verdict.kind.value} {family.verdict.bound}")
    rng = np.random.default_rng(0)
    w = rng.standard_normal((256, 384)).astype(np.float32)
    worst = 0.0
    for batch in batches:
        x = rng.standard_normal((batch, 256)).astype(np.float32)
        exact = x / np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True) + 1e-6) @ w
        worst = max(worst, float(np.abs(family(x, w) - exact).max() / np.abs(exact).max()))
        print(f"batch {batch}: chosen in {family.at(batch).seconds * 1e3:.1f} ms")
    return family.verdict.kind.value, worst


if __name__ == "__main__":
    main()
