"""Superoptimize an attention, check it against float64, and run it on numpy arrays.

Run it with `python examples/quickstart.py`. It prints the choice, its verdict and the times.
"""

import numpy as np

import obelisk as ob


def build(heads: int = 2, rows: int = 64, keys: int = 512, dim: int = 64) -> ob.Graph:
    """softmax(q k / sqrt(d)) v, as plain operators."""
    g = ob.KernelGraph("attention")
    q = g.input((heads, rows, dim), ob.f32, name="q")
    k = g.input((heads, keys, dim), ob.f32, name="k")
    v = g.input((heads, keys, dim), ob.f32, name="v")
    g.output(g.attention(q, k, v), name="out")
    return g.freeze()


def main(budget: float = 20.0) -> float:
    """Give the largest error against float64."""
    program = build()
    best = ob.optimize(program, budget=budget)
    arrays = ob.random_inputs(program, seed=1)
    got = best(*arrays)
    (right,) = ob.run(program, arrays)
    error = float(np.abs(got - right).max())
    print(best.report.sentence())
    print(f"verdict: {best.verdict.kind.value} ({best.verdict.bound})")
    print(f"times, us: {best.baselines}; largest error against float64: {error:.1e}")
    return error


if __name__ == "__main__":
    main()
