"""A program of one's own in a file: `obelisk optimize examples/program.py --batch 4`."""

import obelisk as ob


def program(g: ob.KernelGraph, batch: int = 1, dtype: str = "f32") -> ob.Node:
    """relu(x w1 + b1) w2 for a batch of rows."""
    x = g.input((batch, 256), dtype, name="x")
    w1, b1 = g.input((256, 512), dtype, name="w1"), g.input((512,), dtype, name="b1")
    w2 = g.input((512, 128), dtype, name="w2")
    return g.matmul(g.relu(g.add(g.matmul(x, w1), b1)), w2)
