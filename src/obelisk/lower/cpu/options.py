"""What can be chosen when lowering for a CPU, and what a lowered module is.

Frozen records only. `CpuOptions` is part of a kernel's identity: the same graph, machine and
options give the same text, byte for byte.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from obelisk.machine.description import Machine

MAX_THREADS = 256


@dataclass(frozen=True, slots=True)
class CpuOptions:
    """Lowering choices.

    Attributes:
        rows: rows of a product's register block; 0: what the machine's registers hold.
        vectors: vectors of columns of a product's register block.
        depth: how many steps of a product's depth are packed at a time.
        block_rows, block_columns: rows and columns of a product that are packed at a time.
        pack_columns: the left operand is packed where the result has more columns than this.
        stream_rows: products of at most so many rows read the right operand in place, once.
        alias: read tiles and write results in device memory where no copy is needed.
        unroll: vectors per step of a loop that folds along lanes.
        max_threads: threads that the module has memory for; 0: one per core.
        spin_microseconds: how long a worker of the pool spins before it sleeps.
    """

    rows: int = 0
    vectors: int = 2
    depth: int = 256
    block_rows: int = 192
    block_columns: int = 512
    pack_columns: int = 128
    stream_rows: int = 32
    alias: bool = True
    unroll: int = 4
    max_threads: int = 0
    spin_microseconds: int = 100

    def on(self, machine: Machine) -> CpuOptions:
        """The same options with every 0 replaced by what suits `machine`."""
        # A block of 6 x 2 vectors of sums, its two operands and one more fill 16 registers.
        rows = self.rows or (12 if machine.vector_registers >= 32 else 6)
        threads = self.max_threads or max(1, machine.cores)
        return replace(self, rows=rows, max_threads=min(MAX_THREADS, threads))


@dataclass(frozen=True, slots=True)
class CpuModule:
    """Generated C.

    Attributes:
        source: the whole translation unit; its one entry is `int obelisk_run(void *const *inputs,
            void *const *outputs, void *scratch, int threads)`.
        scratch_bytes: bytes of scratch memory, 64-byte aligned, that a call needs; calls that
            overlap need their own.
        digest: of the source.
        notes: what was decided, for people.
    """

    source: str
    scratch_bytes: int
    digest: str
    notes: tuple[str, ...]
