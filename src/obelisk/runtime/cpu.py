"""A loaded CPU plan: weights in its layout, the key-value cache, and launches.

Another machine, another model and other weights are refused by name.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from obelisk.base.errors import CallError, KernelFault, UserError
from obelisk.plan import Plan, host_identity, refusal
from obelisk.runtime.launch import (
    ABI,
    END_OF_STEP,
    HANG,
    KIND_STEP,
    NONFINITE,
    LaunchStruct,
    load_entry,
)
from obelisk.runtime.packing import aligned
from obelisk.runtime.prefill import Prefill, Segment
from obelisk.runtime.session import REASONS, Sampling, Session, Slot, SlotRun

Array = Any
IDLE = Slot((), 0, Sampling())
PREFILL_FROM = 16  # tokens: the kernel has shorter prompts itself


class CpuSession(Session):
    """A CPU plan with its weights in memory."""

    SPIN_SECONDS = 30.0
    prefill_from = PREFILL_FROM

    def __init__(self, plan: Plan, arena: Array, spin_seconds: float | None = None) -> None:
        """As `Session.__init__`; the arena is an array."""
        self.require_here(plan)
        if arena.nbytes < plan.layout.total_bytes:
            raise UserError(f"weights take {arena.nbytes} bytes, not {plan.layout.total_bytes}")
        super().__init__(plan, arena, spin_seconds)
        self.arena = arena
        self.entry = load_entry(plan.binary)
        self.keys = np.zeros(plan.cache.shape, np.float32)
        self.values = np.zeros(plan.cache.shape, np.float32)
        self.scratch = aligned(plan.scratch_bytes)
        positions = np.arange(plan.context, dtype=np.float64)
        angle = np.outer(positions, np.asarray(plan.frequencies, np.float64))
        self.cosines = np.cos(angle).astype(np.float32)
        self.sines = np.sin(angle).astype(np.float32)
        self.record: Array | None = None
        self._prompts: Prefill | None = None

    @staticmethod
    def require_here(plan: Plan) -> None:
        """As `Session.require_here`."""
        if plan.target != "cpu":
            raise UserError(f"a plan for {plan.target} is no CPU plan")
        why = refusal(plan.host, host_identity(), plan.cores)
        if why is not None:
            raise UserError(f"this plan cannot run here: {why}. Synthesise one on this machine")

    def close(self) -> None:
        """As `Session.close`: the arrays go with the session."""
        self._prompts = None

    def logits(self) -> Array:
        """As `Session.logits`; they are always kept."""
        offset, stride, _ = self.plan.schedule["pages"]["logits"]
        rows = self.scratch.view(np.float32)[offset : offset + self.plan.batch * stride]
        return rows.reshape(self.plan.batch, stride)[:, : self.plan.vocab].copy()

    def cached(self, count: int) -> tuple[Array, Array]:
        """As `Session.cached`: views."""
        return self.keys[:, :, :, :count], self.values[:, :, :, :count]

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

    def _prefill(self, feeds: Sequence[Sequence[int]]) -> None:
        if self._prompts is None:
            self._prompts = Prefill(
                self.plan, self.arena, self.keys, self.values, self.cosines, self.sines
            )
        segments = [Segment(i, int(self.position[i]), tuple(f)) for i, f in enumerate(feeds) if f]
        self._prompts.run(segments)
        for s in segments:
            self.position[s.slot] += len(s.tokens)

    def _launch(
        self, slots: Sequence[Slot], stops: Sequence[int], steps: int | None
    ) -> list[SlotRun]:
        batch = self.plan.batch
        every = [*slots, *[IDLE] * (batch - len(slots))]
        longest = max([1, *(len(s.feed) for s in every)])
        feed = np.zeros((batch, longest), np.int32)
        for i, s in enumerate(every):
            feed[i, : len(s.feed)] = s.feed
        length = np.array([len(s.feed) for s in every], np.int32)
        wanted = np.array([s.want for s in every], np.int32)
        chosen = [s.sampling for s in every]
        total = max([0, *(len(s.feed) + s.want - 1 for s in every if s.feed)])
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
        self._stamps = (arrays["trace"], arrays["traced"])
        if code != 0:
            self.position[:] = before
            raise KernelFault(self._fault(code, call))
        return [
            SlotRun(tuple(int(t) for t in arrays["out"][i, : arrays["made"][i]]),
                    REASONS[int(arrays["reason"][i])])
            for i in range(len(slots))
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
