"""Cutting a program into segments by dynamic programming, evaluated lazily.

Operators are put in one topological order; a segment is an interval of it. The cheapest cover is a
shortest path over the positions. Searching every interval would be wasteful, so the path is first
computed with lower bounds (the roofline of each interval), the intervals on it are searched, and
this repeats until a path with no bound left is the shortest: it is then the optimum over intervals.
At any moment the best path of searched intervals is an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from obelisk.ir import Graph, Node, Op
from obelisk.ir.graph import VIEWS
from obelisk.ir.node import make, topological
from obelisk.machine import Machine, MachineKind, estimate, roofline
from obelisk.machine.cost import LONE_LAUNCH
from obelisk.search.axes import Segment, make_segment
from obelisk.search.sizes import Instance, standalone
from obelisk.search.skeleton import Sizes, Skeleton

_FREE = frozenset({Op.INPUT, Op.CONST, Op.SIZE, Op.IOTA})

# An unsearched interval is expected to take this times its roofline, or more if no single operator
# comes so near by the cost model, or less if a searched interval did.
EXPECTED = 1.5


WORTH = 0.1  # share of the time that a further cover has to promise
ROUND = 16  # intervals that are searched at a time, where so many promise anything


@dataclass(frozen=True, slots=True)
class Choice:
    """A way to compute an interval: a skeleton with sizes, its predicted seconds alone, and the
    processor seconds of the search after which it was there.
    """

    skeleton: Skeleton
    sizes: Sizes
    seconds: float
    moment: float = field(default=0.0, compare=False)


@dataclass
class Interval:
    """Operators i..j-1 of the order as one kernel (or a kernel and its combining kernel).

    Attributes:
        segment: what is searched, or None where it must stay a single predefined operator or a
            view.
        bound: seconds that its work takes at least, launches aside.
        start, stop: positions i and j in the order.
        choices: ranked results once searched (None before).
        seconds: cost of the best choice once known.
    """

    nodes: tuple[Node, ...]
    segment: Segment | None
    bound: float
    start: int
    stop: int
    choices: list[Choice] | None = None
    seconds: float | None = None


@dataclass
class Cover:
    """A program as a path of intervals."""

    intervals: tuple[Interval, ...]
    seconds: float
    exact: bool = field(default=False)


def _side_by_side(order: Sequence[Node]) -> list[Node]:
    """The order with products of one left operand behind each other as soon as they can be: an
    interval then holds them alone, and one kernel can do them all.
    """
    readers: dict[Node, list[Node]] = {}
    for n in order:
        if n.op is Op.MATMUL:
            readers.setdefault(n.inputs[0], []).append(n)
    waiting = set(order)
    out: list[Node] = []

    def emit(n: Node) -> None:
        waiting.discard(n)
        out.append(n)

    def ready(n: Node) -> bool:
        return not any(i in waiting for i in n.inputs)

    for n in order:
        if n not in waiting:
            continue
        emit(n)
        if n.op is Op.MATMUL:
            for m in readers[n.inputs[0]]:
                if m in waiting and ready(m):
                    emit(m)
    return out


class _Before:
    """The tensors that are in device memory before position `start`: inputs, results of operators
    before it, and views of either.
    """

    def __init__(self, position: Mapping[Node, int], start: int) -> None:
        self.position, self.start = position, start

    def __contains__(self, node: object) -> bool:
        while isinstance(node, Node):
            if node.op is Op.INPUT or self.position.get(node, self.start) < self.start:
                return True
            if node.op not in VIEWS:
                return False
            node = node.inputs[0]
        return False


class Partition:
    """Lazy dynamic programming over intervals of a program's operators."""

    def __init__(self, graph: Graph, machine: Machine, window: int) -> None:
        self.graph, self.machine, self.window = graph, machine, window
        self.order = _side_by_side(
            [
                n
                for n in topological(graph.outputs)
                if n.op not in _FREE and not self._is_free_view(n)
            ]
        )
        self.position = {n: i for i, n in enumerate(self.order)}
        self._ends = self._reaches()
        self._asked = (
            False  # whether some interval was asked for: the first path is always searched
        )
        self._insisted = False  # whether a path was searched for want of any kernel of our own
        on_gpu = machine.kind is MachineKind.CUDA
        least = machine.launch_seconds + machine.latency
        self._launch = least if on_gpu else LONE_LAUNCH
        self._intervals: dict[tuple[int, int], Interval | None] = {}
        self._primitive = {n: self._primitive_seconds(n) for n in self.order}
        # The last position at which each value is still read.
        self._last: dict[Node, int] = {}
        for n in topological(graph.outputs):
            at = self._reader(n)
            for i in n.inputs:
                self._last[i] = max(self._last.get(i, -1), at)
        for o in graph.outputs:
            self._last[o] = len(self.order)
        self._views_inherit()
        self.efficiency = max(EXPECTED, self._least_ratio())

    def _is_free_view(self, node: Node) -> bool:
        """A view of an input costs nothing and never needs a kernel."""
        while node.op in VIEWS:
            node = node.inputs[0]
        return node.op in (Op.INPUT, Op.CONST, Op.IOTA)

    def _reaches(self) -> list[int]:
        """For each position the end of the longest interval from it without an operator that no
        kernel does on a value of its own: a concatenation, or a view other than a transpose.
        """
        first: list[int] = []  # where an interval with this operator may begin at the earliest
        for at, node in enumerate(self.order):
            base = node.inputs[0] if node.inputs else node
            if node.op in VIEWS and node.op is not Op.TRANSPOSE:
                while base.op in VIEWS:
                    base = base.inputs[0]
                first.append(self.position.get(base, -1) + 1)
            else:
                first.append(at if node.op is Op.CONCAT else 0)
        ends, end = [], len(self.order)
        for start in reversed(range(len(self.order))):
            stop = next((p for p in range(start, min(end, len(first))) if first[p] > start), end)
            end = min(end, stop)
            if self.order[start].op is Op.CONCAT:
                end = start + 1
            ends.append(end)
        return ends[::-1]

    def _reader(self, node: Node) -> int:
        return self.position.get(node, -1)

    def _views_inherit(self) -> None:
        for n in reversed(topological(self.graph.outputs)):
            if n.op in VIEWS:
                base = n.inputs[0]
                self._last[base] = max(self._last.get(base, -1), self._last.get(n, -1))

    def _primitive_seconds(self, node: Node) -> float:
        if node.op in VIEWS:
            return 0.0
        return estimate(standalone(node.inputs, [node]), self.machine).seconds

    def _least_ratio(self) -> float:
        """The nearest that an operator alone comes to its bound by the cost model."""
        ratios = []
        for i, node in enumerate(self.order):
            alone = self.interval(i, i + 1)
            if alone is not None and alone.segment is not None and alone.bound > 0:
                ratios.append((self._primitive[node] - self._launch) / alone.bound)
        return min(ratios, default=0.0)

    def interval(self, i: int, j: int) -> Interval | None:
        """The interval i..j-1, or None if it cannot be one kernel."""
        if j - i > 1 and j > self._ends[i]:
            return None
        if (i, j) not in self._intervals:
            self._intervals[(i, j)] = self._make(i, j)
        return self._intervals[(i, j)]

    def _make(self, i: int, j: int) -> Interval | None:
        nodes = tuple(self.order[i:j])
        if j - i == 1 and nodes[0].op in VIEWS:
            return Interval(nodes, None, 0.0, i, j, [], 0.0)
        targets = [n for n in nodes if self._last.get(n, -1) >= j]
        leaves = _Before(self.position, i)
        segment = make_segment(targets, leaves) if targets else "nothing is used"
        if isinstance(segment, str):
            if j - i == 1:
                seconds = self._primitive[nodes[0]]
                return Interval(nodes, None, seconds, i, j, [], seconds)
            return None
        bound = roofline(standalone(segment.leaves, segment.targets), self.machine)
        return Interval(nodes, segment, bound, i, j)

    def settle(self, interval: Interval, choices: Sequence[Choice]) -> None:
        """Record what the search of an interval found (best first)."""
        interval.choices = list(choices)
        best = choices[0].seconds if choices else inf
        if len(interval.nodes) == 1:
            best = min(best, self._primitive[interval.nodes[0]])
        interval.seconds = best
        if interval.bound > 0 and best < inf and len(interval.nodes) > 1:
            work = max(0.0, best - self._launch)
            self.efficiency = min(self.efficiency, max(1.0, work / interval.bound))

    def shortest(
        self, known_only: bool, fee: float = 0.0, without: Collection[int] = ()
    ) -> Cover | None:
        """The cheapest path; with `known_only` over searched intervals and single operators. Each
        interval that costs anything costs `fee` seconds more; those in `without` (by `id`) are not
        taken.
        """
        n = len(self.order)
        best: list[float] = [0.0] + [inf] * n
        back: list[Interval | None] = [None] * (n + 1)
        start = [0] * (n + 1)
        for j in range(1, n + 1):
            for i in range(max(0, j - self.window), j):
                if best[i] == inf:
                    continue
                got = self.interval(i, j)
                if got is None or id(got) in without:
                    continue
                if got.seconds is not None:
                    value = got.seconds
                elif not known_only:
                    # Few kernels come closer to their bound than this; expect no miracle.
                    value = got.bound * self.efficiency + self._launch
                elif j - i == 1:
                    value = self._primitive[got.nodes[0]]
                else:
                    continue
                value += fee if value else 0.0
                if best[i] + value < best[j]:
                    best[j], back[j], start[j] = best[i] + value, got, i
        if best[n] == inf:
            return None
        path: list[Interval] = []
        j = n
        while j > 0:
            step = back[j]
            assert step is not None
            path.append(step)
            j = start[j]
        path.reverse()
        return Cover(tuple(path), best[n], all(p.seconds is not None for p in path))

    def covers(self) -> list[Cover]:
        """The best cover of what is searched, and the best one if every kernel cost a share of its
        time more, where that is another: fewer kernels at nearly the same prediction.
        """
        best = self.shortest(known_only=True)
        if best is None:
            return []
        fee = WORTH * best.seconds / max(1, len(best.intervals))
        fewer = self.shortest(known_only=True, fee=fee)
        if fewer is None or fewer.intervals == best.intervals:
            return [best]
        return [best, fewer]

    def wanted(self) -> list[Interval]:
        """The intervals of the shortest path that are not searched yet; none when no path is
        expected to be clearly shorter than the best searched one. Where they are few, also those of
        the next paths, as if the former were in vain: a round then keeps several workers busy.

        Where all that is known are the program's own operators, the cheapest path is searched
        whatever it promises: without one kernel of its own an answer has nothing to measure.
        """
        known = self.shortest(known_only=True) if self._asked else None
        most = known.seconds * (1 - WORTH) if known is not None else inf
        if known is not None and not self._insisted and not any(p.choices for p in known.intervals):
            self._insisted, most = True, inf
        self._asked = True
        asked: dict[int, Interval] = {}
        while len(asked) < ROUND:
            cover = self.shortest(known_only=False, without=asked)
            if cover is None or cover.seconds > most:
                break
            new = {id(p): p for p in cover.intervals if p.seconds is None}
            if not new:
                break
            asked.update(new)
            if len(cover.intervals) == 1:
                break  # a kernel for all of it: what comes of that decides whether to cut
        return list(asked.values())

    def assemble(
        self, cover: Cover, choice: Callable[[Interval], Instance | None]
    ) -> tuple[Node, ...]:
        """The program's outputs with each interval replaced by the chosen instance (None: its own
        operators).
        """
        replaced: dict[Node, Node] = {}
        for interval in cover.intervals:
            instance = choice(interval)
            if instance is None or interval.segment is None:
                for n in interval.nodes:
                    replaced[n] = _rebuild(n, replaced)
            else:
                for target, result in zip(interval.segment.targets, instance.results, strict=True):
                    replaced[target] = _rebuild(result, replaced)
        return tuple(_rebuild(o, replaced) for o in self.graph.outputs)


def _rebuild(node: Node, replaced: dict[Node, Node]) -> Node:
    """`node` over the replacements of what it reads."""
    for n in topological([node]):
        if n not in replaced:
            inputs = tuple(replaced[i] for i in n.inputs)
            replaced[n] = n if inputs == n.inputs else make(n.op, inputs, n.attrs)
    return replaced[node]
