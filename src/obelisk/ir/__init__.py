"""Kernel, block and thread graphs: interned nodes, one operator table, builders, text and JSON
forms, interpreter.

`ir` sees only `base`. Everything else in Obelisk takes and gives its frozen values.
"""

from obelisk.ir.block import BlockGraph, Phase, Reduce, Store
from obelisk.ir.build import BlockBuilder
from obelisk.ir.dtype import DType, parse_dtype
from obelisk.ir.frontend import KernelGraph
from obelisk.ir.graph import Graph, Launch, make_graph
from obelisk.ir.mirage import MirageEntry, load_mirage
from obelisk.ir.mirage_out import save_mirage
from obelisk.ir.node import Node, topological, users
from obelisk.ir.numeric import Precision, random_inputs, run
from obelisk.ir.op import Op
from obelisk.ir.table import TABLE, Kind, OpRow
from obelisk.ir.thread import ThreadGraph, thread_graph

__all__ = [
    "TABLE", "BlockBuilder", "BlockGraph", "DType", "Graph", "KernelGraph", "Kind", "Launch",
    "MirageEntry", "Node", "Op", "OpRow", "Phase", "Precision", "Reduce", "Store", "ThreadGraph",
    "load_mirage", "make_graph", "parse_dtype", "random_inputs", "run", "save_mirage",
    "thread_graph", "topological", "users",
]  # fmt: skip
