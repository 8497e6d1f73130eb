"""From a transformer's configuration to the tile tasks of a decode step, by one table of kinds.

`read_config` gives a `ModelConfig`; `StepShape` joins it with a `Workload` and a `Tiling`;
`operators` and `sequence` give the tasks, `TABLE` what each kind reads, writes, costs and means;
`weight_layout` how a checkpoint is packed.
"""

from obelisk.tasks.config import Family, ModelConfig, Rope, RopeType, parse_config, read_config
from obelisk.tasks.dag import Operator, edges, operators, sequence, task_reads
from obelisk.tasks.kinds import TABLE, KindRow, MicroOp, Region, Task, TaskKind, value_width
from obelisk.tasks.rope import inverse_frequencies, rope_table
from obelisk.tasks.shape import StepShape, Tiling
from obelisk.tasks.weights import CheckpointTensor, checkpoint_tensors, weight_layout
from obelisk.tasks.workload import (
    MAX_BATCH,
    MAX_CONTEXT,
    WeightFormat,
    Workload,
    parse_format,
    parse_head,
    parse_weights,
)

__all__ = [
    "MAX_BATCH", "MAX_CONTEXT", "TABLE", "CheckpointTensor", "Family", "KindRow", "MicroOp",
    "ModelConfig", "Operator", "Region", "Rope", "RopeType", "StepShape", "Task", "TaskKind",
    "Tiling", "WeightFormat", "Workload", "checkpoint_tensors", "edges", "inverse_frequencies",
    "operators", "parse_config", "parse_format", "parse_head", "parse_weights", "read_config",
    "rope_table", "sequence", "task_reads", "value_width", "weight_layout",
]  # fmt: skip
