"""A program's inputs and the right answers to them, made once and kept.

Takes a program and a seed; gives `Answers`. Float64 and the program's own dtypes in numpy take
seconds for large programs (moe: 9 s), and depend on nothing but program, seed and numpy, so they
are kept below the cache directory. What does not read back is made again.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from obelisk.base.digest import digest
from obelisk.base.settings import settings
from obelisk.ir.graph import Graph
from obelisk.tune.inputs import Inputs, input_specs
from obelisk.tune.judge import Reference, Yardstick, reference
from obelisk.tune.regions import Region

FORMAT = "2"  # of what is kept; a change of inputs or of the reference must change it, too
WORTH_KEEPING = 0.5  # seconds of making


class Answers:
    """A program's inputs, in memory that a worker can be lent, and the right answers to them.

    Making one needs nothing but the program and the seed: it may be made ahead, in another thread.

    Attributes:
        program, seed: what it is of.
        regions: the shared memory, one region per input.
        inputs, right: the input sets, and the answers.
    """

    def __init__(self, program: Graph, seed: int) -> None:
        self.program, self.seed = program, seed
        self.regions = [Region(s.nbytes, i) for i, s in enumerate(input_specs(program))]
        # The sets live in the shared memory itself: no copy, however large the weights are.
        self.inputs = Inputs(program, seed, [r.data for r in self.regions])
        file = _file(program, seed)
        begin = time.monotonic()
        known = _read(file, program, self.inputs)
        self.right = known or reference(program, self.inputs)
        if known is None and time.monotonic() - begin > WORTH_KEEPING:
            with contextlib.suppress(OSError):  # a cache that cannot be written costs time alone
                _write(file, self.right, self.inputs.scale)

    def close(self) -> None:
        """Give the memory back."""
        for region in self.regions:
            region.close()


def _file(program: Graph, seed: int) -> Path:
    key = digest("answers", FORMAT, program.digest, str(seed), np.__version__)
    return settings().cache_dir / "answers" / f"{key}.npz"


def _write(file: Path, right: Reference, scale: float) -> None:
    """Keep a reference and the deviation of its inputs."""
    parts = {
        "scale": np.array(scale),
        "sticks": np.array([(y.ratio, y.relative, y.norm) for y in right.yardsticks]),
    }
    for k, (exact, masks) in enumerate(zip(right.expected, right.judged, strict=True)):
        for i, (values, mask) in enumerate(zip(exact, masks, strict=True)):
            parts[f"exact{k}_{i}"] = values
            if mask is not None:
                parts[f"mask{k}_{i}"] = mask
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=file.parent, suffix=".part", delete=False) as stream:
        np.savez(stream, allow_pickle=False, **parts)
    os.replace(stream.name, file)


def _read(file: Path, program: Graph, inputs: Inputs) -> Reference | None:
    """What was kept, the inputs brought to their deviation; None where it is not there or not
    whole.
    """
    try:
        with np.load(file) as parts:
            sticks = tuple(Yardstick(*map(float, row)) for row in parts["sticks"])
            pairs = [
                [
                    (parts[f"exact{k}_{i}"], parts.get(f"mask{k}_{i}"))
                    for i in range(len(program.outputs))
                ]
                for k in range(inputs.sets)
            ]
            scale = float(parts["scale"])
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):
        return None
    shapes = [node.shape for node in program.outputs]
    if any([e.shape for e, _ in row] != shapes for row in pairs) or len(sticks) != len(shapes):
        return None
    while inputs.scale > scale:
        inputs.halve()
    return Reference(
        tuple(tuple(e for e, _ in row) for row in pairs),
        tuple(tuple(m for _, m in row) for row in pairs),
        sticks,
    )
