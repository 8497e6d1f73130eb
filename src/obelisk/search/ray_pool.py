"""Units on a Ray cluster: actors that hold the search's bench, the same tasks, the same outcomes.

Needs the extra `ray`, and Obelisk installed on the cluster's machines. An actor that dies loses
only what it was at; that is tried once more on another.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from importlib import import_module
from typing import Any

from obelisk.base.errors import MissingDependency, UserError
from obelisk.search.pool import AHEAD
from obelisk.search.units import Bench, Context, Limits, Outcome, Task


class _Actor:
    """What runs on the cluster; made a Ray actor below."""

    def __init__(self, context: Context) -> None:
        self.bench = Bench.from_text(context, lambda: "")

    def run(self, task: Task, limits: Limits) -> Outcome:
        """Do one unit."""
        return self.bench.run(task, limits)


class RayPool:
    """An `Executor` on a Ray cluster, or on a local Ray that it starts and ends itself.

    Args:
        address: "ray" (this machine) or "ray://HOST:PORT".
        workers: actors; by default one per processor of the cluster.

    Raises `MissingDependency` without the extra, `UserError` if the cluster cannot be reached.
    """

    def __init__(
        self,
        context: Context,
        limits: Callable[[], Limits],
        address: str,
        workers: int | None = None,
    ) -> None:
        try:
            ray: Any = import_module("ray")
        except ImportError as e:
            raise MissingDependency(
                "workers on Ray need the package ray: install obelisk[ray]"
            ) from e
        self._ray = ray
        self.retried = self.dropped = self.peak = 0
        self._limits = limits
        self._own = not ray.is_initialized()
        if self._own:
            try:
                if address == "ray":
                    ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False)
                else:
                    ray.init(address=address, log_to_driver=False)
            except (ConnectionError, RuntimeError, ValueError) as e:
                raise UserError(f"no Ray cluster at {address}: {e}") from None
        self.workers = workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
        self._actor: Any = ray.remote(_Actor)
        self._context = ray.put(context)
        self._actors: list[Any] = [self._actor.remote(self._context) for _ in range(self.workers)]
        self._busy: list[deque[tuple[Any, Task]]] = [deque() for _ in self._actors]
        self._tasks: deque[Task] = deque()
        self._again: set[str] = set()

    def submit(self, task: Task) -> None:
        """Queue a unit."""
        self._tasks.append(task)

    def live_states(self) -> int:
        """Nothing runs in this process."""
        return 0

    def results(self, timeout: float) -> list[Outcome]:
        """Outcomes of the actors."""
        self._dispatch()
        places = {ref: i for i, busy in enumerate(self._busy) for ref, _ in busy}
        if not places:
            time.sleep(timeout)
            return []
        done, _ = self._ray.wait(list(places), num_returns=1, timeout=timeout)
        out: list[Outcome] = []
        for ref in done:
            i = places[ref]
            if all(r is not ref for r, _ in self._busy[i]):
                continue  # its actor was found dead a moment ago
            try:
                result: Outcome = self._ray.get(ref)
            except self._ray.exceptions.RayActorError:
                out += self._bury(i)
                continue
            self._busy[i] = deque(x for x in self._busy[i] if x[0] is not ref)
            self.peak = max(self.peak, result.memory)
            out.append(result)
        self._dispatch()
        return out

    def close(self) -> None:
        """End the actors, and Ray itself if it was started here."""
        self._tasks.clear()
        for actor in self._actors:
            self._ray.kill(actor)
        self._actors.clear()
        if self._own:
            self._ray.shutdown()

    def _dispatch(self) -> None:
        for depth in range(AHEAD):
            for actor, busy in zip(self._actors, self._busy, strict=True):
                if len(busy) == depth and self._tasks:
                    task = self._tasks.popleft()
                    busy.append((actor.run.remote(task, self._limits()), task))

    def _bury(self, i: int) -> list[Outcome]:
        """An actor died: another takes its place; its first task is tried once more."""
        waiting = [task for _, task in self._busy[i]]
        self._actors[i] = self._actor.remote(self._context)
        self._busy[i].clear()
        given_up: list[Outcome] = []
        if waiting and waiting[0].key in self._again:
            self.dropped += 1
            given_up.append(Outcome(waiting.pop(0).key, stopped="dropped"))
        elif waiting:
            self.retried += 1
            self._again.add(waiting[0].key)
        self._tasks.extendleft(reversed(waiting))
        return given_up
