"""Have a rewrite of your own judged: division moved behind a product, right and wrong.

Run it with `python examples/judge_a_rewrite.py`. It needs no compiler.
"""

import obelisk as ob
from obelisk.verify import verify


def norm_first(x: ob.Node, w: ob.Node, g: ob.KernelGraph) -> ob.Node:
    """rms_norm, then the product."""
    return g.matmul(g.rms_norm(x), w)


def product_first(x: ob.Node, w: ob.Node, g: ob.KernelGraph) -> ob.Node:
    """The same: a row's divisor does not depend on the column."""
    return g.div(g.matmul(x, w), g.sqrt(g.mean(g.square(x))))


def without_mean(x: ob.Node, w: ob.Node, g: ob.KernelGraph) -> ob.Node:
    """Wrong: the sum of squares where the mean belongs."""
    return g.div(g.matmul(x, w), g.sqrt(g.sum(g.square(x), 1)))


def main() -> list[str]:
    """Give the verdicts of the right and the wrong rewrite."""
    graphs = []
    for formula in (norm_first, product_first, without_mean):
        g = ob.KernelGraph(formula.__name__)
        x, w = g.input((4, 64), ob.f32, name="x"), g.input((64, 96), ob.f32, name="w")
        g.output(formula(x, w, g))
        graphs.append(g.freeze())
    verdicts = []
    for candidate in graphs[1:]:
        verdict = verify(graphs[0], candidate)
        print(f"{candidate.name}: {verdict.kind.value}; {verdict.witness or verdict.bound}")
        verdicts.append(verdict.kind.value)
    return verdicts


if __name__ == "__main__":
    main()
