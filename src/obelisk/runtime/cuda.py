"""A loaded CUDA plan: weights and cache on the device, and launches of whole steps.

`CudaSession` has the interface of `Session`; a launch uploads the prompts, runs the one kernel once
for all steps, and reads the new tokens back. Another device, another model and other weights are
refused by name. It contains no compiler and imports none.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from obelisk.base.errors import KernelFault, UserError
from obelisk.plan import HostIdentity, Plan, read_plan
from obelisk.plan.layout import align
from obelisk.runtime.cuda_driver import GPU, Device, Kernel
from obelisk.runtime.session import REASONS, Sampling, Session, SlotRun, packed_weights
from obelisk.runtime.timeline import spans_of

Array = Any
SLOTS = 8
SPIN_SECONDS = 5.0
TAG_END = 1 << 31  # what blocks exchange is cleared before its numbers could repeat
_FAULT = 8  # 32-bit fields of a fault
_POINTERS = (
    "weights", "keys", "values", "exchanged", "cosines", "sines", "feed", "out", "made", "reason",
    "position_out", "fault", "trace", "traced", "meet",
)  # fmt: skip
_INTS = (
    "uses",
    "steps",
    "feed_stride",
    "out_stride",
    "stop_count",
    "trace_room",
    "keep_logits",
    "withhold",
)
_SLOT_INTS = ("feed_length", "want", "position", "planned", "top_k")


class CudaLaunch(ctypes.Structure):
    """`om_launch` of the generated source, field by field."""

    _fields_ = [
        *((n, ctypes.c_uint64) for n in _POINTERS),
        ("spin_ns", ctypes.c_uint64),
        ("tag", ctypes.c_uint32),
        *((n, ctypes.c_int32) for n in _INTS),
        *((n, ctypes.c_int32 * SLOTS) for n in _SLOT_INTS),
        ("temperature", ctypes.c_float * SLOTS),
        ("top_p", ctypes.c_float * SLOTS),
        ("seed", ctypes.c_uint64 * SLOTS),
        ("stops", ctypes.c_int32 * SLOTS),
    ]


@dataclass(frozen=True, slots=True)
class _Slot:
    """What one slot does in a launch: its tokens, the step from which it chooses, how many steps it
    takes part in, how many new tokens, and how they are chosen.
    """

    feed: tuple[int, ...]
    length: int
    planned: int
    wanted: int
    sampling: Sampling


IDLE = _Slot((), 0, 0, 0, Sampling())


def _seconds(stamps: Array, counts: Array) -> Array:
    """Time stamps (blocks, room, 3) of nanoseconds as seconds since the first one."""
    filled = [stamps[b, : int(n), 1] for b, n in enumerate(counts) if n]
    origin = np.uint64(min(int(f.min()) for f in filled)) if filled else np.uint64(0)
    out = stamps.astype(np.float64)
    for i in (1, 2):
        out[:, :, i] = (stamps[:, :, i] - origin).astype(np.int64) * 1e-9
    return out


def gpu_refusal(
    made_on: HostIdentity, here: HostIdentity, capability: tuple[int, int]
) -> str | None:
    """Why a plan for `made_on` cannot run on this device; None when it can.

    A plan that was measured names its device; one that was made without a GPU names the
    architecture and how many SMs it needs.
    """
    number = made_on.machine.removeprefix("sm_").rstrip("af")
    if number != f"{capability[0]}{capability[1]}":
        arch = f"sm_{capability[0]}{capability[1]}"
        return f"it was made for {made_on.machine}, this is {here.title} ({arch})"
    if made_on.title and made_on.title != here.title:
        return f"it was made for {made_on.title}, this is {here.title}"
    if made_on.cores > here.cores:
        return f"it needs {made_on.cores} SMs, {here.title} has {here.cores}"
    return None


def _device_of(plan: Plan) -> Device:
    """This machine's device; raises `UserError` where the plan was made for another."""
    device = Device()
    why = gpu_refusal(plan.host, device.identity(plan.host.machine), device.capability)
    if why is not None:
        raise UserError(f"this plan cannot run here: {why}. Synthesise one for this device")
    return device


class CudaSession(Session):
    """A CUDA plan with its weights in device memory.

    Attributes:
        kernel_seconds: seconds on the device of the latest launch.
        keep_logits: whether launches store every logit (`logits` reads them).
        withhold: a fault for tests: one more than the block that withholds its values; 0 is none.
    """

    prefills = False  # the kernel runs prompts

    def __init__(self, plan: Plan, arena: Array | int, spin_seconds: float = SPIN_SECONDS) -> None:
        """Take a plan and its packed weights: an array, or the address of device memory."""
        if plan.target != "cuda":
            raise UserError(f"a plan for {plan.target} is no CUDA plan")
        device = self.device = _device_of(plan)
        self.plan, self.spin_seconds = plan, spin_seconds
        how: Mapping[str, Any] = plan.schedule["launch"]
        self.how = how
        self._owned: list[int] = []
        if isinstance(arena, int):
            self.weights = arena
        else:
            if arena.nbytes < plan.layout.total_bytes:
                raise UserError(f"weights take {arena.nbytes} bytes, not {plan.layout.total_bytes}")
            self.weights = self._new(plan.layout.total_bytes)
            device.upload(self.weights, arena)
        self.kernel = Kernel(
            device, plan.binary, how["entry"], how["blocks"], how["threads"], how["shared"]
        )
        half = plan.cache.nbytes // 2
        self.key_memory, self.value_memory = self._new(half), self._new(half)
        self.exchanged = self._new(how["exchanged"])
        angle = np.outer(
            np.arange(plan.context, dtype=np.float64), np.asarray(plan.frequencies, np.float64)
        )
        self.tables = [self._new(4 * angle.size) for _ in range(2)]
        for address, table in zip(self.tables, (np.cos(angle), np.sin(angle)), strict=True):
            device.upload(address, table.astype(np.float32))
        self.small = self._new(4096)
        self.position = np.zeros(plan.batch, np.int32)
        self.tag = self.uses = 0
        self.debug = self.keep_logits = False
        self.trace_room = self.withhold = self.steps_done = 0
        self.kernel_seconds = 0.0
        self.spans = []

    def _new(self, nbytes: int) -> int:
        address = self.device.allocate(nbytes)
        self._owned.append(address)
        return address

    def _forget(self) -> None:
        """Clear what blocks exchanged: the numbers begin anew."""
        self.device.zero(self.exchanged, self.how["exchanged"])
        self.tag = self.uses = 0

    def close(self) -> None:
        """Give all device memory back; the session must not be used any more."""
        for address in self._owned:
            self.device.free(address)
        self._owned = []
        self.kernel.close()

    @staticmethod
    def load(
        plan: str | Path | Plan,
        weights_dir: str | Path | None = None,
        *,
        spin_seconds: float = SPIN_SECONDS,
    ) -> CudaSession:
        """A session from a plan file; raises what `Session.load` raises."""
        what = plan if isinstance(plan, Plan) else read_plan(plan)
        _device_of(what)  # refused before the weights are read
        return CudaSession(what, packed_weights(what, weights_dir), spin_seconds)

    def logits(self) -> Array:
        """The logits of the latest step, float32 (batch, vocab); needs `keep_logits`."""
        b, vocab = self.plan.batch, self.plan.vocab
        rows = align(vocab, 16)
        at = self.exchanged + self.how["places"]["logits"]
        pairs = self.device.download(at, (b, rows, 2), np.uint32)
        return np.ascontiguousarray(pairs[:, :vocab, 0]).view(np.float32)

    def prefill(self, feeds: Sequence[Sequence[int]]) -> None:
        """Run the tokens of `feeds` through slots 0, 1, ... without choosing tokens: the same
        kernel without its head. Raises `CallError` when a limit would be exceeded.
        """
        self.check(feeds, [1] * len(feeds))
        work = [_Slot(tuple(f), len(f) + 1, len(f), 0, Sampling()) if f else IDLE for f in feeds]
        self._run(work, (), max([0, *map(len, feeds)]))

    def launch(
        self,
        feeds: Sequence[Sequence[int]],
        want: Sequence[int],
        sampling: Sequence[Sampling] = (),
        stops: Sequence[int] = (),
        steps: int | None = None,
    ) -> list[SlotRun]:
        """As `Session.launch`. Slots that stop early keep their place in the launch, unheard."""
        self.check(feeds, want, sampling, stops)
        chosen = list(sampling) + [Sampling()] * (len(feeds) - len(sampling))
        work = [
            _Slot(tuple(f), len(f), len(f) + w - 1, w, c) if f else IDLE
            for f, w, c in zip(feeds, want, chosen, strict=False)
        ]
        total = max([0, *(s.planned for s in work)])
        return self._run(work, stops, total if steps is None else min(steps, total))

    def _run(self, work: Sequence[_Slot], stops: Sequence[int], count: int) -> list[SlotRun]:
        if self.debug:
            raise UserError(
                "a CUDA plan has no debug mode: debug a CPU plan of the same model, or compare "
                "the logits (keep_logits)"
            )
        batch, device, blocks = self.plan.batch, self.device, self.kernel.blocks
        self.steps_done, self.spans = 0, []
        if count < 1:
            return [SlotRun((), "") for _ in work]
        if self.tag + (count + 1) * self.how["tags"] >= TAG_END:
            self._forget()
        slots = [*work, *[IDLE] * (batch - len(work))]
        feed = np.zeros((batch, max(1, *(len(s.feed) for s in slots))), np.int32)
        for i, s in enumerate(slots):
            feed[i, : len(s.feed)] = s.feed
        room = max(1, *(s.wanted for s in slots))
        sizes = (feed.nbytes, 4 * batch * room, 24 * self.trace_room * blocks, 4 * blocks)
        starts = np.cumsum([0, *(align(s, 256) for s in sizes)])
        memory = device.allocate(int(starts[-1]))
        feeds, out, trace, traced = (memory + int(x) for x in starts[:-1])
        try:
            device.upload(feeds, feed)
            device.zero(self.small, 512)
            call = self._call(slots, stops, count)
            call.feed, call.feed_stride = feeds, feed.shape[1]
            call.out, call.out_stride = out, room
            call.trace, call.traced = trace, traced
            self.kernel_seconds = self.kernel.run(call)
            self.tag += count * self.how["tags"]
            self.uses = (self.uses + count * self.plan.layout.layers) % 2
            fault = device.download(self.small, (_FAULT,), np.uint32)
            if fault[0]:
                self._forget()
                raise KernelFault(self._waited([int(x) for x in fault]))
            made, reason, reached = device.download(self.small + 256, (3, 16), np.int32)[:, :batch]
            tokens = device.download(out, (batch, room), np.int32)
            stamps = device.download(trace, (blocks, self.trace_room, 3), np.uint64)
            counts = device.download(traced, (blocks,), np.int32)
        finally:
            device.free(memory)
        self.position[:] = reached
        self.steps_done = count
        if self.trace_room:
            self.spans = spans_of(self.plan.kinds, _seconds(stamps, counts), counts)
        return [
            SlotRun(tuple(int(t) for t in tokens[i, : made[i]]), REASONS[int(reason[i])])
            for i in range(len(work))
        ]

    def _call(self, slots: Sequence[_Slot], stops: Sequence[int], count: int) -> CudaLaunch:
        """The launch record, but for what differs in place from call to call."""
        random = any(s.sampling.temperature > 0 for s in slots)
        call = CudaLaunch(
            weights=self.weights, keys=self.key_memory, values=self.value_memory,
            exchanged=self.exchanged, cosines=self.tables[0], sines=self.tables[1],
            made=self.small + 256, reason=self.small + 320, position_out=self.small + 384,
            fault=self.small, meet=self.small + 128, spin_ns=int(self.spin_seconds * 1e9),
            tag=self.tag, uses=self.uses, steps=count, stop_count=len(stops),
            trace_room=self.trace_room,
            keep_logits=int(self.keep_logits or random), withhold=self.withhold,
        )  # fmt: skip
        for i, s in enumerate(slots):
            call.feed_length[i], call.want[i] = s.length, s.wanted
            call.planned[i], call.position[i] = min(s.planned, count), self.position[i]
            call.temperature[i], call.top_p[i] = s.sampling.temperature, s.sampling.top_p
            call.top_k[i], call.seed[i] = s.sampling.top_k, s.sampling.seed
        for i, token in enumerate(stops):
            call.stops[i] = token
        return call

    def _waited(self, fault: Sequence[int]) -> str:
        _, block, _, edge, step, layer, expected, seen = fault
        where = f"layer {layer}" if layer < self.plan.layout.layers else "the end of the step"
        return (
            f"block {block} (consumer) waited {self.spin_seconds:g} s in step {step}, {where}, for "
            f"{self.how['waits'][edge]}: expected mark {expected}, saw {seen}"
        )


def load_session(plan: str | Path | Plan, weights_dir: str | Path | None = None) -> Session:
    """The session that serves a plan's target; raises what its `load` raises."""
    what = plan if isinstance(plan, Plan) else read_plan(plan)
    if what.target == "cpu":
        return Session.load(what, weights_dir)
    if what.target == "cuda":
        return CudaSession.load(what, weights_dir)
    raise UserError(f"this Obelisk runs plans for cpu and cuda, not for {what.target}")


__all__ = ["GPU", "CudaSession", "load_session"]
