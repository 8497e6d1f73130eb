"""Serve several batch sizes with one function: a compiled program for each shape, made once.

Run it with `python examples/many_shapes.py`. The first call of a shape optimizes it (or finds it in
the cache), each later call only looks it up.
"""

import time

import numpy as np

import obelisk as ob


@ob.jit(budget=10.0)
def block(g: ob.KernelGraph, x: ob.Node, gain: ob.Node, w: ob.Node) -> ob.Node:
    """rms_norm(x) * gain, projected."""
    return g.matmul(g.rms_norm(x, gain, eps=1e-6), w)


def main(batches: tuple[int, ...] = (1, 2, 7)) -> dict[int, float]:
    """Give microseconds of the second call by batch size."""
    rng = np.random.default_rng(0)
    gain, w = (rng.standard_normal(s).astype(np.float32) for s in ((256,), (256, 384)))
    seconds: dict[int, float] = {}
    for batch in batches:
        x = rng.standard_normal((batch, 256)).astype(np.float32)
        y = block(x, gain, w)
        begin = time.perf_counter()
        again = block(x, gain, w)
        seconds[batch] = (time.perf_counter() - begin) * 1e6
        exact = x / np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True) + 1e-6) * gain @ w
        np.testing.assert_allclose(y, exact, rtol=1e-4, atol=1e-3)
        np.testing.assert_array_equal(y, again)
        print(f"batch {batch}: second call {seconds[batch]:.0f} us")
    return seconds


if __name__ == "__main__":
    main()
