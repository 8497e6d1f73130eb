"""A loaded CUDA plan: weights and cache on the device, and launches of whole steps.

A launch uploads the prompts, runs the one kernel once for all steps, and reads the new tokens back.
Long prompts go through torch, where it is there (`prefill_torch`). Another device, another model
and other weights are refused by name.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from obelisk.base.errors import KernelFault, UserError
from obelisk.plan import HostIdentity, Plan
from obelisk.plan.layout import align
from obelisk.runtime.cuda_driver import Device, Kernel
from obelisk.runtime.prefill import Segment
from obelisk.runtime.session import REASONS, Sampling, Session, Slot, SlotRun

Array = Any
SLOTS = 8
CACHES: dict[str, Any] = {"fp32": np.float32, "bf16": ml_dtypes.bfloat16, "fp16": np.float16}
PREFILL_FROM = 32  # tokens: from there on, unpacking the weights once costs less than steps
IMPORT_SECONDS = 6.0  # of torch and its libraries, where nothing has imported it yet
STEP_SECONDS = 1e-3  # of a plan that was not measured
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
class _Part:
    """What one slot does in a launch: its tokens, the step from which it chooses, how many steps it
    takes part in, how many new tokens, and how they are chosen.
    """

    feed: tuple[int, ...]
    length: int
    planned: int
    wanted: int
    sampling: Sampling


IDLE = _Part((), 0, 0, 0, Sampling())


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


def has_torch() -> bool:
    """Whether torch is installed; it is not imported."""
    return importlib.util.find_spec("torch") is not None


class CudaSession(Session):
    """A CUDA plan with its weights in device memory.

    Attributes:
        kernel_seconds: seconds on the device of the latest launch.
        alone: whether all prompts stay in the kernel; so where torch is not installed.
        withhold: a fault for tests: one more than the block that withholds its values; 0 is none.
    """

    SPIN_SECONDS = 5.0

    def __init__(self, plan: Plan, arena: Array | int, spin_seconds: float | None = None) -> None:
        """As `Session.__init__`; the arena is an array, or the address of device memory."""
        device = self.device = self.require_here(plan)
        super().__init__(plan, arena, spin_seconds)
        how: Mapping[str, Any] = plan.schedule["launch"]
        self.how = how
        self._owned: list[int] = []
        self._prompts: Any = None  # a `TorchPrefill`, once it was needed
        self.kernel = Kernel(
            device, plan.binary, how["entry"], how["blocks"], how["threads"], how["shared"]
        )
        try:
            self._take_memory(arena)
        except BaseException:  # where memory is short, a smaller plan may find room
            self.close()
            raise
        self.tag = self.uses = self.withhold = 0
        self.apart = int(how.get("apart", 0))
        self.kernel_seconds = 0.0
        self.alone = not has_torch()

    def _take_memory(self, arena: Array | int) -> None:
        """Weights, cache, what blocks exchange, rotary tables."""
        plan, device = self.plan, self.device
        if isinstance(arena, int):
            self.weights = arena
        else:
            if arena.nbytes < plan.layout.total_bytes:
                raise UserError(f"weights take {arena.nbytes} bytes, not {plan.layout.total_bytes}")
            self.weights = self._new(plan.layout.total_bytes)
            device.upload(self.weights, arena)
        half = plan.cache.nbytes // 2
        self.key_memory, self.value_memory = self._new(half), self._new(half)
        self.exchanged = self._new(self.how["exchanged"])
        angle = np.outer(
            np.arange(plan.context, dtype=np.float64), np.asarray(plan.frequencies, np.float64)
        )
        self.tables = [self._new(4 * angle.size) for _ in range(2)]
        for address, table in zip(self.tables, (np.cos(angle), np.sin(angle)), strict=True):
            device.upload(address, table.astype(np.float32))
        self.small = self._new(4096)

    def _new(self, nbytes: int) -> int:
        address = self.device.allocate(nbytes)
        self._owned.append(address)
        return address

    def _forget(self) -> None:
        """Clear what blocks exchanged: the numbers begin anew."""
        self.device.zero(self.exchanged, self.how["exchanged"])
        self.tag = self.uses = 0
        if self.apart:  # zero is a mark of some layer: each begins with what is none of its own
            words = np.empty(self.apart // 4, np.uint32)
            for layer in range(self.plan.layout.layers):
                mark, use = (layer + 1) & 7, (layer + 1) & 1
                words[:] = mark ^ 7 | (use ^ 1) << 16
                if self.plan.cache.format == "fp32":  # bit 0 alone; of `down` by the buffer's uses
                    words[:] = use ^ 1
                    at, end = (self.how["places"][x] // 4 for x in ("down", "act"))
                    words[at:end] = layer // 2 & 1
                self.device.upload(self.exchanged + layer * self.apart, words)

    def exchanged_values(self, name: str, layer: int, shape: tuple[int, ...], kind: Any) -> Array:
        """What blocks exchanged under a name in the latest step, as stored; of every layer where
        the kernel records (`mega.cuda.emit.recording`), else of the last to use the place.
        """
        at = self.exchanged + self.how["places"][name] + layer * self.apart
        return self.device.download(at, shape, kind)

    def close(self) -> None:
        self._prompts = None
        for address in self._owned:
            self.device.free(address)
        self._owned = []
        self.kernel.close()

    @staticmethod
    def require_here(plan: Plan) -> Device:
        """As `Session.require_here`; gives this machine's device."""
        if plan.target != "cuda":
            raise UserError(f"a plan for {plan.target} is no CUDA plan")
        device = Device()
        why = gpu_refusal(plan.host, device.identity(plan.host.machine), device.capability)
        if why is not None:
            raise UserError(f"this plan cannot run here: {why}. Synthesise one for this device")
        return device

    def logits(self) -> Array:
        """As `Session.logits`."""
        b, vocab = self.plan.batch, self.plan.vocab
        rows = align(vocab, 16)
        at = self.exchanged + self.how["places"]["logits"]
        pairs = self.device.download(at, (b, rows, 2), np.uint32)
        return np.ascontiguousarray(pairs[:, :vocab, 0]).view(np.float32)

    def cached(self, count: int) -> tuple[Array, Array]:
        """As `Session.cached`."""
        c = self.plan.cache
        kind = np.dtype(CACHES[c.format])
        out = np.empty((2, c.layers * c.slots * c.kv_heads, count, c.head_dim), np.float32)
        each = c.context * c.head_dim * kind.itemsize
        for rows, base in zip(out, (self.key_memory, self.value_memory), strict=True):
            for i in range(len(rows)):
                rows[i] = self.device.download(base + i * each, (count, c.head_dim), kind)
        keys, values = out.reshape(2, c.layers, c.slots, c.kv_heads, count, c.head_dim)
        return keys, values

    @property
    def prefill_from(self) -> int | None:
        """As `Session.prefill_from`: more tokens where torch would have to be imported for them."""
        if self.alone:
            return None
        if "torch" in sys.modules:
            return PREFILL_FROM
        step = float(self.plan.measured.get("step_seconds", STEP_SECONDS))
        return max(PREFILL_FROM, int(IMPORT_SECONDS / step))

    def _prefill(self, feeds: Sequence[Sequence[int]]) -> None:
        """Long prompts by torch, short ones by the kernel without its head."""
        least, longest = self.prefill_from, max(map(len, feeds))
        # one more: the last token of a prompt is left to the kernel
        if least is not None and longest + 1 >= least and self.outside(feeds):
            return
        work = [_Part(tuple(f), len(f) + 1, len(f), 0, Sampling()) if f else IDLE for f in feeds]
        self._run(work, (), longest)

    def outside(self, feeds: Sequence[Sequence[int]]) -> bool:
        """As `prefill`, but outside the kernel however short the prompts are; False, and nothing
        is done, where that cannot be.
        """
        self._check_prompts(feeds)
        if self.alone:
            return False
        from obelisk.runtime.prefill_torch import OutOfMemory, TorchPrefill

        if self._prompts is None:
            where = self._tensors() if TorchPrefill.serves(self.plan) else None
            if where is None:
                self.alone = True
                return False
            self._prompts = TorchPrefill(self.plan, *where)
        segments = [Segment(i, int(self.position[i]), tuple(f)) for i, f in enumerate(feeds) if f]
        try:
            self._prompts.run(segments)
        except OutOfMemory:
            warnings.warn(
                "the device has no memory left for prompts outside the kernel: they run in it, a "
                "token a step", RuntimeWarning, stacklevel=4,
            )  # fmt: skip
            self._prompts, self.alone = None, True
            return False
        for s in segments:
            self.position[s.slot] += len(s.tokens)
        return True

    def _tensors(self) -> list[Any] | None:
        """The arena, keys, values, cosines and sines as torch's tensors; None where torch does not
        see the device.
        """
        half, table = (
            self.plan.cache.nbytes // 2,
            4 * self.plan.context * len(self.plan.frequencies),
        )
        parts = (
            (self.weights, self.plan.layout.total_bytes), (self.key_memory, half),
            (self.value_memory, half), (self.tables[0], table), (self.tables[1], table),
        )  # fmt: skip
        return self.device.tensors(parts)

    def _launch(
        self, slots: Sequence[Slot], stops: Sequence[int], steps: int | None
    ) -> list[SlotRun]:
        """Slots that stop early keep their place in the launch, unheard."""
        work = [
            _Part(s.feed, len(s.feed), len(s.feed) + s.want - 1, s.want, s.sampling)
            if s.feed else IDLE
            for s in slots
        ]  # fmt: skip
        total = max([0, *(s.planned for s in work)])
        return self._run(work, stops, total if steps is None else min(steps, total))

    def _run(self, work: Sequence[_Part], stops: Sequence[int], count: int) -> list[SlotRun]:
        if self.debug:
            raise UserError(
                "a CUDA plan has no debug mode: debug a CPU plan of the same model, or compare "
                "the logits (keep_logits)"
            )
        batch, device, blocks = self.plan.batch, self.device, self.kernel.blocks
        self.steps_done, self._stamps = 0, None
        if count < 1:
            return [SlotRun((), "") for _ in work]
        if self.apart and count > 1:
            raise UserError("a recording kernel runs one step a launch: feed it single tokens")
        if self.apart or self.tag + (count + 1) * self.how["tags"] >= TAG_END:
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
            self.uses = (self.uses + count) % 4  # steps: how often a place was used, modulo 4
            fault = device.download(self.small, (_FAULT,), np.uint32)
            if fault[0]:
                self._forget()
                raise KernelFault(self._waited([int(x) for x in fault]))
            made, reason, reached = device.download(self.small + 256, (3, 16), np.int32)[:, :batch]
            tokens = device.download(out, (batch, room), np.int32)
            if self.trace_room:
                self._stamps = self._recorded(trace, device.download(traced, (blocks,), np.int32))
        finally:
            device.free(memory)
        self.position[:] = reached
        self.steps_done = count
        return [
            SlotRun(tuple(int(t) for t in tokens[i, : made[i]]), REASONS[int(reason[i])])
            for i in range(len(work))
        ]

    def _call(self, slots: Sequence[_Part], stops: Sequence[int], count: int) -> CudaLaunch:
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

    def _recorded(self, trace: int, counts: Array) -> tuple[Array, Array]:
        """What each block filled of its room for time stamps, as seconds."""
        stamps = np.zeros((len(counts), max(1, int(counts.max())), 3), np.uint64)
        for block, count in enumerate(counts):
            at = trace + 24 * self.trace_room * block
            stamps[block, :count] = self.device.download(at, (int(count), 3), np.uint64)
        return _seconds(stamps, counts), counts

    def _waited(self, fault: Sequence[int]) -> str:
        _, block, _, edge, step, layer, expected, seen = fault
        where = f"layer {layer}" if layer < self.plan.layout.layers else "the end of the step"
        return (
            f"block {block} (consumer) waited {self.spin_seconds:g} s in step {step}, {where}, for "
            f"{self.how['waits'][edge]}: expected mark {expected}, saw {seen}"
        )
