"""A loaded plan: weights in its layout, the key-value cache, and launches.

`Session.load` refuses another machine, another model and other weights by name; `Session.launch`
checks every limit before it starts anything. It contains no compiler and imports none. One session
serves one caller at a time.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from obelisk.base.errors import CallError, KernelFault, UserError
from obelisk.plan import Plan, host_identity, read_plan, refusal
from obelisk.runtime.checkpoint import Checkpoint, differing, file_digests
from obelisk.runtime.launch import (
    ABI,
    END_OF_STEP,
    HANG,
    KIND_STEP,
    MAX_STOPS,
    NONFINITE,
    LaunchStruct,
    load_entry,
)
from obelisk.runtime.packing import aligned, pack
from obelisk.runtime.prefill import Prefill, Segment
from obelisk.runtime.timeline import Span, spans_of

Array = Any
SPIN_SECONDS = 30.0
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
class SlotRun:
    """What a launch did for one slot: new tokens, why it ended ("" when it may go on)."""

    tokens: tuple[int, ...]
    reason: str


def packed_weights(plan: Plan, weights_dir: str | Path | None = None) -> Array:
    """A plan's weights in its layout, from the directory that it names or from `weights_dir`.

    Raises `UserError` where there is none, or where it holds other weights than the plan's.
    """
    folder = Path(weights_dir or plan.weights_path)
    if not folder.is_dir():
        raise UserError(
            f"the plan's weights are not in {folder}: name their directory with --weights-dir"
        )
    bad = differing(plan.weights_digests, file_digests(folder))
    if bad is not None:
        raise UserError(f"{folder} does not hold the weights that the plan was made for: {bad}")
    checkpoint = Checkpoint(folder)
    checkpoint.check(plan.tensors, plan.layout.layers)
    return pack(plan.layout, checkpoint.tensor, checkpoint.grouped)


class Session:
    """A plan with its weights in memory.

    `debug` stops a launch at the first number that is not finite; `trace_room` > 0 records that
    many tasks of each core, of the latest launch, in `spans`. `prefills` says
    whether `prefill` is there.
    """

    prefills = True

    def __init__(self, plan: Plan, arena: Array, spin_seconds: float = SPIN_SECONDS) -> None:
        """Take a plan and its packed weights; `load` is the usual way in."""
        here = host_identity()
        why = refusal(plan.host, here, plan.cores)
        if why is not None:
            raise UserError(f"this plan cannot run here: {why}. Synthesise one on this machine")
        if arena.nbytes < plan.layout.total_bytes:
            raise UserError(f"weights take {arena.nbytes} bytes, not {plan.layout.total_bytes}")
        self.plan, self.arena, self.spin_seconds = plan, arena, spin_seconds
        self.entry = load_entry(plan.binary)
        self.keys = np.zeros(plan.cache.shape, np.float32)
        self.values = np.zeros(plan.cache.shape, np.float32)
        self.scratch = aligned(plan.scratch_bytes)
        positions = np.arange(plan.context, dtype=np.float64)
        angle = np.outer(positions, np.asarray(plan.frequencies, np.float64))
        self.cosines = np.cos(angle).astype(np.float32)
        self.sines = np.sin(angle).astype(np.float32)
        self.position = np.zeros(plan.batch, np.int32)
        self.debug = False
        self.trace_room = 0
        self.spans: list[Span] = []
        self.steps_done = 0
        self.record: Array | None = None
        self._prefill: Prefill | None = None

    @staticmethod
    def load(
        plan: str | Path | Plan,
        weights_dir: str | Path | None = None,
        *,
        spin_seconds: float = SPIN_SECONDS,
    ) -> Session:
        """A session from a plan file; `weights_dir` overrides the directory that the plan names.

        Raises `UserError` for another machine, another model or other weights, and `ParseError` for
        a damaged file.
        """
        what = plan if isinstance(plan, Plan) else read_plan(plan)
        why = refusal(what.host, host_identity(), what.cores)
        if why is not None:
            raise UserError(f"this plan cannot run here: {why}. Synthesise one on this machine")
        return Session(what, packed_weights(what, weights_dir), spin_seconds)

    def reset(self, slot: int | None = None) -> None:
        """Forget what a slot (or all) holds."""
        self.position[slice(None) if slot is None else slot] = 0

    def start_recording(self) -> None:
        """From now on, launches keep what each operator wrote in their last step (`recorded`)."""
        self.record = np.zeros(int(self.plan.schedule["probes"]["size"]), np.float32)

    def recorded(self, kind: str, value: str, layer: int = 0) -> Array:
        """What an operator wrote in the latest launch's last step, (batch, width); raises
        `CallError` where nothing was recorded, or there is no such operator.
        """
        probes = self.plan.schedule["probes"]
        place = probes["places"].get(f"{kind}:{value}")
        if self.record is None or place is None:
            known = ", ".join(probes["places"])
            raise CallError(
                f"no record of {kind}:{value}: start_recording first; known are {known}"
            )
        at = place[0] + (layer * probes["layer"] if place[0] < probes["layer"] else 0)
        return self.record[at : at + self.plan.batch * place[1]].reshape(self.plan.batch, place[1])

    def room(self, slot: int) -> int:
        """Positions that are left in a slot."""
        return self.plan.context - int(self.position[slot])

    def prefill(self, feeds: Sequence[Sequence[int]]) -> None:
        """Run the tokens of `feeds` through slots 0, 1, ... outside the kernel: writes their keys
        and values and moves the positions on, without choosing tokens (see `runtime.prefill`).

        Raises `CallError` when a limit would be exceeded.
        """
        self._check_tokens(feeds)
        for slot, feed in enumerate(feeds):
            if len(feed) > self.room(slot):
                raise CallError(
                    f"slot {slot}: {len(feed)} tokens, but {self.room(slot)} positions of the "
                    f"plan's context of {self.plan.context} are left"
                )
        if self._prefill is None:
            self._prefill = Prefill(
                self.plan, self.arena, self.keys, self.values, self.cosines, self.sines
            )
        segments = [Segment(i, int(self.position[i]), tuple(f)) for i, f in enumerate(feeds) if f]
        self._prefill.run(segments)
        for s in segments:
            self.position[s.slot] += len(s.tokens)

    def _check_tokens(self, feeds: Sequence[Sequence[int]]) -> None:
        batch, vocab = self.plan.batch, self.plan.vocab
        if len(feeds) > batch:
            raise CallError(f"{len(feeds)} sequences, but the plan's batch is {batch}")
        for slot, feed in enumerate(feeds):
            for token in feed:
                if not 0 <= token < vocab:
                    raise CallError(f"token id {token} in slot {slot}: expected 0 to {vocab - 1}")

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
        batch = self.plan.batch
        chosen = list(sampling) + [Sampling()] * (batch - len(sampling))
        longest = max([1, *(len(f) for f in feeds)])
        feed = np.zeros((batch, longest), np.int32)
        length, wanted = np.zeros(batch, np.int32), np.zeros(batch, np.int32)
        for slot, tokens in enumerate(feeds):
            feed[slot, : len(tokens)] = tokens
            length[slot], wanted[slot] = len(tokens), want[slot]
        total = max([0, *(len(f) + w - 1 for f, w in zip(feeds, want, strict=True) if f)])
        room = max(1, int(wanted.max()))
        arrays: dict[str, Array] = {
            "weights": self.arena, "keys": self.keys, "values": self.values,
            "scratch": self.scratch, "cosines": self.cosines, "sines": self.sines, "feed": feed,
            "feed_length": length, "want": wanted, "position": self.position,
            "out": np.zeros((batch, room), np.int32), "made": np.zeros(batch, np.int32),
            "reason": np.zeros(batch, np.int32),
            "temperature": np.array([s.temperature for s in chosen], np.float32),
            "top_p": np.array([s.top_p for s in chosen], np.float32),
            "top_k": np.array([s.top_k for s in chosen], np.int32),
            "seed": np.array([s.seed for s in chosen], np.uint64),
            "cpus": np.array(_cpus(self.plan.cores), np.int32),
            "trace": np.zeros((self.plan.cores, max(1, self.trace_room), 3)),
            "traced": np.zeros(self.plan.cores, np.int32),
        }  # fmt: skip
        call = LaunchStruct(
            abi=ABI, cores=self.plan.cores, batch=batch,
            steps=total if steps is None else min(steps, total),
            feed_stride=longest, out_stride=room, stop_count=len(stops), debug=int(self.debug),
            trace_room=self.trace_room,
            spin_seconds=self.spin_seconds,
        )  # fmt: skip
        if self.record is not None:
            arrays["record"] = self.record
        for name, array in arrays.items():
            setattr(call, name, array.ctypes.data)
        for i, token in enumerate(stops):
            call.stops[i] = token
        before = self.position.copy()
        code = self.entry(ctypes.byref(call))
        self.steps_done = int(call.steps_done)
        self.spans = spans_of(self.plan.kinds, arrays["trace"], arrays["traced"])
        if code != 0:
            self.position[:] = before
            raise KernelFault(self._fault(code, call))
        return [
            SlotRun(tuple(int(t) for t in arrays["out"][i, : arrays["made"][i]]),
                    REASONS[int(arrays["reason"][i])])
            for i in range(len(feeds))
        ]  # fmt: skip

    def _fault(self, code: int, call: Any) -> str:
        if code == NONFINITE:
            kind, layer = divmod(int(call.fault_edge), KIND_STEP)
            return (
                f"{self.plan.kinds[kind]} of layer {layer} gave a number that is not finite, in "
                f"step {call.fault_step}, slot {call.fault_slot}, element {call.fault_expected}"
            )
        if code == HANG:
            return (
                f"core {call.fault_core} waited {self.spin_seconds:g} s in step {call.fault_step} "
                f"for {self._edge(int(call.fault_edge))}: expected {call.fault_expected} arrivals, "
                f"saw {call.fault_seen}"
            )
        if code == -1:
            return "the plan's kernel has another interface than this runtime: synthesise it again"
        return f"thread {call.fault_core} could not be started on its core"

    def _edge(self, number: int) -> str:
        if number == END_OF_STEP:
            return "the end of the step"
        if number < 0:
            return f"the barrier before {self.plan.barriers[-1 - number]}"
        for e in self.plan.edges:
            layers = self.plan.layout.layers if e.layered else 1
            if e.base <= number < e.base + e.groups * layers:
                layer, group = divmod(number - e.base, e.groups)
                where = f" of layer {layer}" if e.layered else ""
                return f"{e.name}{where}" + (f", head group {group}" if e.groups > 1 else "")
        return f"edge {number}"


def _cpus(cores: int) -> list[int]:
    """The processors that threads are pinned to: the first ones this process may use."""
    if not hasattr(os, "sched_getaffinity"):
        return [-1] * cores
    return sorted(os.sched_getaffinity(0))[:cores]
