"""The test bench of one tuning: shared memory around the worker, the right answers, and checked
calls.

Takes the program, its `Reference` and a size of scratch memory; `put` and `blank` prepare a call,
`broken` and `judged` look at what it left. Everything is judged on this side, from memory that the
worker only lends out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

from obelisk.ir.graph import Graph
from obelisk.tune.answers import Answers
from obelisk.tune.inputs import TensorSpec, input_specs, output_specs
from obelisk.tune.judge import Judgement, fill, judge
from obelisk.tune.regions import Region
from obelisk.tune.rigs import CPU, Rig
from obelisk.tune.supervisor import Supervisor


class Bench:
    """A context manager: memory and worker are released at the end.

    Attributes:
        program, inputs, right: what is computed, on what, and the right answers.
        limit: seconds that one checked call may take.
        rig: the kind of device.
        child: the worker, started on demand.
    """

    def __init__(
        self,
        program: Graph,
        seed: int,
        threads: int,
        limit: float,
        scratch_bytes: int,
        rig: Rig = CPU,
        answers: Callable[[], Answers] | None = None,
        imports: Sequence[str] = (),
    ) -> None:
        """`answers` gives those of the program, made ahead; the bench closes them. `imports` are
        modules that a device's worker will need.
        """
        self.program, self.limit, self.rig = program, limit, rig
        self._specs_in, self._specs_out = input_specs(program), output_specs(program)
        self._answers = Answers(program, seed) if answers is None else answers()
        self.inputs, self.right = self._answers.inputs, self._answers.right
        self._ins = self._answers.regions
        self.outs = [Region(s.nbytes, i) for i, s in enumerate(self._specs_out)]
        self._scratch = Region(max(scratch_bytes, 1))
        hello = {
            "inputs": [_plain(s) for s in self._specs_in],
            "outputs": [_plain(s) for s in self._specs_out],
            "input_regions": [_place(r) for r in self._ins],
            "output_regions": [_place(r) for r in self.outs],
            "scratch_region": _place(self._scratch),
            "threads": threads,
            "ordinal": rig.ordinal,
            "imports": list(imports),
        }
        self.child = Supervisor(hello, tuple(r.spec.fd for r in self._regions()), rig.worker)

    def _regions(self) -> list[Region]:
        return [*self._ins, *self.outs, self._scratch]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.child.stop()
        self._answers.close()
        for region in (*self.outs, self._scratch):
            region.close()

    def put(self, which: int) -> None:
        """Put input set `which` where the worker reads it.

        Always the same addresses, so a stale copy shows.
        """
        self.inputs.select(which)

    def blank(self, turn: int, scratch_bytes: int = 0) -> None:
        """Fill the outputs with the turn's NaN, the scratch area with garbage (on a device its
        worker does), and set all canaries.
        """
        for region, spec in zip(self.outs, self._specs_out, strict=True):
            region.data.reshape(-1, spec.dtype.numpy.itemsize)[:] = fill(spec.dtype, turn)
            region.arm()
        if not self.rig.on_device:
            self._scratch.data[:scratch_bytes] = 0xFF
        self._scratch.arm(scratch_bytes)

    def broken(self, scratch_bytes: int = 0) -> str:
        """Which canary was overwritten, in words; empty when none was."""
        for name, region in zip(self.program.output_names, self.outs, strict=True):
            if text := region.broken():
                return f"output {name!r}: {text}"
        text = self._scratch.broken(scratch_bytes)
        return f"scratch area of {scratch_bytes} bytes: {text}" if text else ""

    def judged(self, which: int, turn: int) -> Judgement:
        """Judge what the shared outputs hold after a call on input set `which`, blanked with
        `turn`.
        """
        return judge([r.data for r in self.outs], self.program, self.right, which, turn)


def _plain(spec: TensorSpec) -> dict[str, Any]:
    strides: Sequence[int] | None = spec.strides
    return {"shape": spec.shape, "dtype": spec.dtype.value, "strides": strides}


def _place(region: Region) -> tuple[int, int]:
    return region.spec.fd, region.spec.nbytes
