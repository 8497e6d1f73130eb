"""Checks built candidates, races the right ones in a worker process, and selects the fastest.

`tune` takes a program, its built candidates (`TuneItem`) and optional Python baselines
(`Contender`), and gives a `TuneReport`. It promises that nothing wrong wins, that no candidate can
end the run, and that the numbers follow the protocol of docs/tune.md.
"""

from obelisk.tune.answers import Answers
from obelisk.tune.rigs import CPU, Rig, cuda_rig
from obelisk.tune.tuner import tune
from obelisk.tune.types import Contender, Measured, Setup, Status, TuneItem, TuneReport

__all__ = [
    "CPU", "Answers", "Contender", "Measured", "Rig", "Setup", "Status", "TuneItem", "TuneReport",
    "cuda_rig", "tune",
]  # fmt: skip
