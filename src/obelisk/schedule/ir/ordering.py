"""List scheduling: the order of micro-operations inside a task, from their own DAG.

Takes `Node`s (unit, cycles of issue, latency, registers, what they wait for) and a limit of live
registers; gives an `Order`. At each cycle the ready node with the longest way to the end goes first
(Graham's list scheduling with critical-path priorities); a node that would exceed the registers
waits until earlier results have been used up. Equal arguments give equal orders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from obelisk.base.errors import Infeasible, InternalError


@dataclass(frozen=True, slots=True)
class Node:
    """One micro-operation.

    Attributes:
        unit: the unit that issues it; one unit issues one node at a time.
        issue: cycles that the unit is taken.
        latency: cycles until the result can be used (at least `issue`).
        registers: 32-bit registers of a thread that the result takes until its last use.
        uses: positions of the nodes whose results it uses.
        after: positions of nodes that it must follow without using their registers.
    """

    unit: str
    issue: int
    latency: int
    registers: int = 0
    uses: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    @property
    def waits(self) -> tuple[int, ...]:
        """Everything that comes before it."""
        return (*self.uses, *self.after)


@dataclass(frozen=True, slots=True)
class Order:
    """A schedule of nodes.

    Attributes:
        order: positions of the nodes, in order of issue.
        start: for each node (by position), the cycle of its issue.
        cycles: when the last result is there.
        registers: the most that are live at a time.
    """

    order: tuple[int, ...]
    start: tuple[int, ...]
    cycles: int
    registers: int


def critical_path(nodes: Sequence[Node]) -> list[int]:
    """For each node, cycles from its issue to the end over the longest chain behind it."""
    out = [n.latency for n in nodes]
    for i in reversed(range(len(nodes))):
        for j in nodes[i].waits:
            if j >= i:
                raise InternalError(f"micro-operation {i} waits for {j}, which does not precede it")
            out[j] = max(out[j], nodes[j].latency + out[i])
    return out


def live_registers(nodes: Sequence[Node], order: Sequence[int]) -> int:
    """The most registers that are live while `order` is issued: a result lives from its issue to
    its last user's, whose own result may take its place (to the end when it has no user).
    """
    users = [0] * len(nodes)
    for n in nodes:
        for j in set(n.uses):
            users[j] += 1
    live = peak = 0
    left = list(users)
    for i in order:
        for j in set(nodes[i].uses):
            left[j] -= 1
            if left[j] == 0:
                live -= nodes[j].registers
        live += nodes[i].registers
        peak = max(peak, live)
    return peak


class _State:
    """Registers and units while an order is built."""

    def __init__(self, nodes: Sequence[Node], limit: int) -> None:
        self.nodes, self.limit, self.live = nodes, limit, 0
        self.left = [0] * len(nodes)
        for n in nodes:
            for j in set(n.uses):
                self.left[j] += 1
        self.free: dict[str, int] = {}
        self.start = [-1] * len(nodes)

    def delta(self, i: int) -> int:
        """Registers that issuing a node adds once its operands' last uses are past."""
        gone = sum(self.nodes[j].registers for j in set(self.nodes[i].uses) if self.left[j] == 1)
        return self.nodes[i].registers - gone

    def fits(self, i: int) -> bool:
        """Whether a node's result fits beside what stays live (it may take its operands' place)."""
        return self.live + self.delta(i) + self.reserve(i) <= self.limit

    def reserve(self, i: int) -> int:
        """Registers that must stay free when a node issues: what the earliest open user still
        needs. Without this, results that wait for partners fill the registers and nothing can go
        on.
        """
        first = next((c for c, n in enumerate(self.nodes) if self.start[c] < 0 and n.uses), None)
        if first is None or i == first or i in self.nodes[first].uses:
            return 0
        missing = [j for j in set(self.nodes[first].uses) if self.start[j] < 0]
        return sum(self.nodes[j].registers for j in missing)

    def ready(self, i: int) -> int:
        """The first cycle at which a node may issue."""
        n = self.nodes[i]
        data = max((self.start[j] + self.nodes[j].latency for j in n.waits), default=0)
        return max(data, self.free.get(n.unit, 0))

    def take(self, i: int) -> None:
        """Issue a node."""
        n = self.nodes[i]
        self.start[i] = self.ready(i)
        self.free[n.unit] = self.start[i] + n.issue
        for j in set(n.uses):
            self.left[j] -= 1
            if self.left[j] == 0:
                self.live -= self.nodes[j].registers
        self.live += n.registers


def list_schedule(nodes: Sequence[Node], registers: int) -> Order:
    """An order under a limit of live registers: a greedy one, or where that gets stuck the order
    in which the nodes are given.

    Raises `Infeasible` when that takes more registers, too; the text says how many the greedy order
    lacked.
    """
    path = critical_path(nodes)
    state = _State(nodes, registers)
    given = tuple(range(len(nodes)))
    todo = set(range(len(nodes)))
    order: list[int] = []
    while todo:
        open_ = [i for i in todo if all(state.start[j] >= 0 for j in nodes[i].waits)]
        fitting = [i for i in open_ if state.fits(i)]
        if not fitting and live_registers(nodes, given) <= registers:
            state = _State(nodes, registers)
            order = list(given)
            for i in order:
                state.take(i)
            break
        if not fitting:
            need = min(state.live + state.delta(i) + state.reserve(i) for i in open_)
            raise Infeasible(
                f"a task's micro-operations need {need} registers of a thread or more, its share "
                f"is {registers}: use fewer warps or smaller chunks"
            )
        # When the next producer would leave no room for its own consumers, prefer what frees.
        pick = min(fitting, key=lambda i: (state.ready(i), -path[i], state.delta(i), i))
        state.take(pick)
        order.append(pick)
        todo.remove(pick)
    start = state.start
    cycles = max((start[i] + n.latency for i, n in enumerate(nodes)), default=0)
    return Order(tuple(order), tuple(start), cycles, live_registers(nodes, order))
