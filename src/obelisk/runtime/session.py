"""What serves a plan: limits, positions, and the interface of prompts and launches.

`Session` is the plain base of `CpuSession` and `CudaSession`, which add memory and a kernel. Every
limit is checked before anything starts. A session contains no compiler and imports none, and serves
one caller at a time.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from obelisk.base.errors import CallError, UserError
from obelisk.plan import Plan, read_plan
from obelisk.runtime.checkpoint import Checkpoint, differing, file_digests
from obelisk.runtime.launch import MAX_STOPS
from obelisk.runtime.packing import pack
from obelisk.runtime.timeline import Span, spans_of

Array = Any
REASONS = {0: "", 1: "stop", 2: "length"}


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen: temperature 0 is greedy; top_k 0 and top_p 1 keep everything."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def check(self) -> None:
        """Raise `UserError` for values that mean nothing."""
        if not 0.0 <= self.temperature < float("inf"):
            raise UserError(f"temperature is {self.temperature}, expected 0 or more")
        if self.top_k < 0:
            raise UserError(f"top_k is {self.top_k}, expected 0 (off) or more")
        if not 0.0 < self.top_p <= 1.0:
            raise UserError(f"top_p is {self.top_p}, expected above 0 and at most 1")
        if not 0 <= self.seed < 1 << 64:
            raise UserError(f"seed is {self.seed}, expected 0 to 2^64 - 1")


@dataclass(frozen=True, slots=True)
class Slot:
    """What a launch asks of one slot: tokens to take in (none: it is left out), new tokens, and how
    they are chosen.
    """

    feed: tuple[int, ...]
    want: int
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class SlotRun:
    """What a launch did for one slot: new tokens, why it ended ("" when it may go on)."""

    tokens: tuple[int, ...]
    reason: str


def require_weights(plan: Plan, weights_dir: str | Path | None = None) -> Path:
    """The directory of a plan's weights: `weights_dir`, or the one that it names. Raises
    `UserError` where there is none.
    """
    folder = Path(weights_dir or plan.weights_path)
    if not folder.is_dir():
        raise UserError(
            f"the plan's weights are not in {folder}: name their directory with --weights-dir"
        )
    return folder


def packed_weights(plan: Plan, weights_dir: str | Path | None = None) -> Array:
    """A plan's weights in its layout, from the directory that it names or from `weights_dir`.

    Raises `UserError` where there is none, or where it holds other weights than the plan's.
    """
    folder = require_weights(plan, weights_dir)

    def packed() -> Array:
        checkpoint = Checkpoint(folder)
        checkpoint.check(plan.tensors, plan.layout.layers)
        return pack(plan.layout, checkpoint.tensor, checkpoint.grouped, checkpoint.raw)

    with ThreadPoolExecutor(1) as pool:  # packed while the files are hashed; only then used
        arena = pool.submit(packed)
        bad = differing(plan.weights_digests, file_digests(folder))
        if bad is not None:
            raise UserError(f"{folder} does not hold the weights that the plan was made for: {bad}")
        return arena.result()


@dataclass(frozen=True, slots=True)
class Loaded:
    """Seconds that loading took: reading the plan and asking the device, reading, checking and
    packing the weights, and the rest: the kernel, memory, copies.
    """

    plan: float
    weights: float
    rest: float


class Session(ABC):
    """A plan with its weights in memory.

    Attributes:
        plan: what is served.
        position: of each slot, how many positions it holds.
        spin_seconds: how long a wait inside the kernel may take.
        debug: a launch stops at the first number that is not finite.
        trace_room: above 0, this many tasks of each core are recorded (`spans`).
        steps_done: of the latest launch.
        loaded: what loading took, where `load` did it.
        keep_logits: whether launches must keep all logits of their last step (`logits`).
    """

    SPIN_SECONDS: ClassVar[float]

    @abstractmethod
    def __init__(self, plan: Plan, arena: Any, spin_seconds: float | None = None) -> None:
        """Take a plan and its packed weights; `load` is the usual way in. Raises what
        `require_here` raises.
        """
        self.plan = plan
        self.spin_seconds = self.SPIN_SECONDS if spin_seconds is None else spin_seconds
        self.keep_logits = False
        self.position = np.zeros(plan.batch, np.int32)
        self.debug = False
        self.trace_room = self.steps_done = 0
        self.loaded: Loaded | None = None
        self._stamps: tuple[Array, Array] | None = None

    @staticmethod
    @abstractmethod
    def require_here(plan: Plan) -> Any:
        """Raise `UserError` where the plan was made for another target or another machine."""

    @classmethod
    def load(
        cls, plan: str | Path | Plan, weights_dir: str | Path | None = None, *,
        spin_seconds: float | None = None,
    ) -> Self:  # fmt: skip
        """A session from a plan file; `weights_dir` overrides the directory that the plan names.

        Raises `UserError` for another machine, another model or other weights, and `ParseError` for
        a damaged file.
        """
        start = time.perf_counter()
        what = plan if isinstance(plan, Plan) else read_plan(plan)
        cls.require_here(what)  # refused before the weights are read
        read = time.perf_counter()
        arena = packed_weights(what, weights_dir)
        packed = time.perf_counter()
        session = cls(what, arena, spin_seconds)
        session.loaded = Loaded(read - start, packed - read, time.perf_counter() - packed)
        return session

    @property
    def spans(self) -> list[Span]:
        """The tasks of the latest launch that were recorded."""
        return [] if self._stamps is None else spans_of(self.plan.kinds, *self._stamps)

    @property
    @abstractmethod
    def prefill_from(self) -> int | None:
        """The length from which a prompt is better run outside the kernel; None: never."""

    @abstractmethod
    def _prefill(self, feeds: Sequence[Sequence[int]]) -> None:
        """Run checked prompts, and move the positions on."""

    @abstractmethod
    def _launch(
        self, slots: Sequence[Slot], stops: Sequence[int], steps: int | None
    ) -> list[SlotRun]:
        """Run checked slots."""

    @abstractmethod
    def logits(self) -> Array:
        """The logits of the latest step, float32 (batch, vocab); needs `keep_logits`."""

    @abstractmethod
    def cached(self, count: int) -> tuple[Array, Array]:
        """Keys and values of the first `count` positions, float32 (layers, slots, kv_heads, count,
        head_dim).
        """

    @abstractmethod
    def close(self) -> None:
        """Give memory back; the session must not be used any more."""

    def reset(self, slot: int | None = None) -> None:
        """Forget what a slot (or all) holds."""
        self.position[slice(None) if slot is None else slot] = 0

    def room(self, slot: int) -> int:
        """Positions that are left in a slot."""
        return self.plan.context - int(self.position[slot])

    def prefill(self, feeds: Sequence[Sequence[int]]) -> None:
        """Run the tokens of `feeds` through slots 0, 1, ...: writes their keys and values and moves
        the positions on, without choosing tokens.

        Raises `CallError` when a limit would be exceeded.
        """
        self._check_prompts(feeds)
        if any(feeds):
            self._prefill(feeds)

    def _check_prompts(self, feeds: Sequence[Sequence[int]]) -> None:
        self._check_tokens(feeds)
        for slot, feed in enumerate(feeds):
            if len(feed) > self.room(slot):
                raise CallError(
                    f"slot {slot}: {len(feed)} tokens, but {self.room(slot)} positions of the "
                    f"plan's context of {self.plan.context} are left"
                )

    def launch(
        self,
        feeds: Sequence[Sequence[int]],
        want: Sequence[int],
        sampling: Sequence[Sampling] = (),
        stops: Sequence[int] = (),
        steps: int | None = None,
    ) -> list[SlotRun]:
        """Run slots 0, 1, ...: first the tokens of `feeds` (none: the slot is left out), then up to
        `want` new ones, until `stops`; at most `steps` steps in all.

        Raises `CallError` when a limit would be exceeded and `KernelFault` when the kernel stopped
        itself.
        """
        self.check(feeds, want, sampling, stops)
        chosen = [*sampling, *[Sampling()] * (len(feeds) - len(sampling))]
        slots = [Slot(tuple(f), w, c) for f, w, c in zip(feeds, want, chosen, strict=True)]
        return self._launch(slots, stops, steps)

    def check(
        self,
        feeds: Sequence[Sequence[int]],
        want: Sequence[int],
        sampling: Sequence[Sampling] = (),
        stops: Sequence[int] = (),
    ) -> None:
        """Raise what `launch` would for these arguments; nothing runs."""
        self._check(feeds, want)
        if len(stops) > MAX_STOPS:
            raise CallError(f"{len(stops)} stop tokens, the kernel takes {MAX_STOPS}")
        for s in sampling:
            s.check()

    def _check_tokens(self, feeds: Sequence[Sequence[int]]) -> None:
        batch, vocab = self.plan.batch, self.plan.vocab
        if len(feeds) > batch:
            raise CallError(f"{len(feeds)} sequences, but the plan's batch is {batch}")
        for slot, feed in enumerate(feeds):
            for token in feed:
                if not 0 <= token < vocab:
                    raise CallError(f"token id {token} in slot {slot}: expected 0 to {vocab - 1}")

    def _check(self, feeds: Sequence[Sequence[int]], want: Sequence[int]) -> None:
        self._check_tokens(feeds)
        for slot, (feed, new) in enumerate(zip(feeds, want, strict=True)):
            if feed and new < 1:
                raise CallError(f"slot {slot} asks for {new} new tokens, expected 1 or more")
            need = len(feed) + new - 1  # the last new token is not stored
            if feed and need > self.room(slot):
                raise CallError(
                    f"slot {slot}: {len(feed)} tokens and {new} new ones need {need} positions, "
                    f"{self.room(slot)} of the plan's context of {self.plan.context} are left"
                )
