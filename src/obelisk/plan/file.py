"""The plan file: everything a megakernel needs to run, and to be understood, in one archive.

`write_plan` and `read_plan` store a `Plan` as a zip archive of `plan.json`, the source and the
binary (`MEMBERS`); any tool can open it and nothing in it needs a compiler. Equal plans give equal
bytes. The format has a version, and digests of its parts; docs/plan-format.md has every field.
"""

from __future__ import annotations

import json
import os
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from obelisk.base.digest import digest
from obelisk.base.errors import ParseError, UserError
from obelisk.plan.host import HostIdentity
from obelisk.plan.layout import CacheLayout, WeightLayout

FORMAT = "obelisk-plan"
VERSION = 4
MEMBERS = {  # source and binary, by target
    "cpu": ("kernel.c", "kernel.so"),
    "cuda": ("kernel.cu", "kernel.cubin"),
}
_DAMAGE = (zipfile.BadZipFile, zlib.error, KeyError, ValueError, OSError, EOFError, RuntimeError)
_EPOCH = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class EdgeName:
    """A family of counters: what an edge's number in a fault report means."""

    name: str
    base: int
    groups: int
    layered: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan.

    Attributes:
        target: "cpu" or "cuda".
        host: the processor it was compiled for (a GPU: system "CUDA", machine the architecture).
        cores: threads, one a core; thread blocks, one an SM.
        model: the model's configuration, as `tasks` writes it.
        model_digest: digest of the configuration.
        weights_path: the directory that the weights were in.
        weights_digests: digest of each weight file.
        tensors: every checkpoint tensor (`{layer}` for all layers) and its shape.
        workload: batch, context, weight format.
        schedule: choices, pages and counts, for people.
        edges, barriers, kinds: names for fault reports.
        layout: where weights lie; cache: where keys and values lie.
        scratch_bytes: memory between tasks.
        frequencies: inverse rotary frequencies, radians per position.
        eos: token ids that end a sequence.
        tolerance: largest error found against the float64 meaning, relative to the largest logit;
            None where the plan was made without the device that it is for.
        judged: what was compared for it, and the errors of keys and values (may be empty).
        measured: what was timed when the plan was made (may be empty).
        source: C or CUDA C++; binary: the shared library or the cubin.
    """

    target: str
    host: HostIdentity
    cores: int
    model: Mapping[str, Any]
    model_digest: str
    weights_path: str
    weights_digests: Mapping[str, str]
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    workload: Mapping[str, Any]
    schedule: Mapping[str, Any]
    edges: tuple[EdgeName, ...]
    barriers: tuple[str, ...]
    kinds: tuple[str, ...]
    layout: WeightLayout
    cache: CacheLayout
    scratch_bytes: int
    frequencies: tuple[float, ...]
    eos: tuple[int, ...]
    tolerance: float | None
    measured: Mapping[str, Any]
    source: str
    binary: bytes
    judged: Mapping[str, Any] = field(default_factory=dict)

    @property
    def batch(self) -> int:
        """Slots."""
        return int(self.workload["batch"])

    @property
    def context(self) -> int:
        """Positions of a slot."""
        return int(self.workload["context"])

    @property
    def vocab(self) -> int:
        """Token ids."""
        return int(self.model["vocab"])

    def manifest(self) -> dict[str, Any]:
        """The content of `plan.json`."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "target": self.target,
            "host": self.host.to_json(),
            "cores": self.cores,
            "model": dict(self.model),
            "model_digest": self.model_digest,
            "weights": {"path": self.weights_path, "digests": dict(self.weights_digests)},
            "tensors": [[n, list(s)] for n, s in self.tensors],
            "workload": dict(self.workload),
            "schedule": dict(self.schedule),
            "edges": [[e.name, e.base, e.groups, e.layered] for e in self.edges],
            "barriers": list(self.barriers),
            "kinds": list(self.kinds),
            "layout": self.layout.to_json(),
            "cache": self.cache.to_json(),
            "scratch_bytes": self.scratch_bytes,
            "frequencies": list(self.frequencies),
            "eos": list(self.eos),
            "tolerance": self.tolerance,
            "judged": dict(self.judged),
            "measured": dict(self.measured),
            "source_digest": digest(self.source),
            "binary_digest": digest(self.binary),
        }


def write_plan(plan: Plan, path: str | Path) -> None:
    """Store a plan, whole or not at all."""
    target = Path(path)
    work = target.with_name(f".{target.name}.{os.getpid()}")
    text = json.dumps(plan.manifest(), indent=1, sort_keys=True) + "\n"
    code, built = MEMBERS[plan.target]
    parts = (("plan.json", text.encode()), (code, plan.source.encode()), (built, plan.binary))
    try:
        with zipfile.ZipFile(work, "w") as archive:
            for name, data in parts:
                info = zipfile.ZipInfo(name, _EPOCH)
                info.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(info, data)
        os.replace(work, target)
    finally:
        work.unlink(missing_ok=True)


def read_plan(path: str | Path) -> Plan:
    """Read a plan and check its digests.

    Raises `UserError` where there is no file, `ParseError` when it is no plan, has another version,
    or was damaged.
    """
    target = Path(path)
    if not target.is_file():
        raise UserError(f"no plan {path}: make one with `obelisk synth MODEL_DIR -o {path}`")
    try:
        with zipfile.ZipFile(target) as archive:
            data = json.loads(archive.read("plan.json"))
            target_name = data.get("target", "cpu") if isinstance(data, dict) else "cpu"
            code, built = MEMBERS.get(target_name, MEMBERS["cpu"])
            source, binary = archive.read(code).decode(), archive.read(built)
    except _DAMAGE as error:
        raise ParseError(f"{path} is no plan, or a damaged one: {error}") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ParseError(f"{path} is no plan: its format is not {FORMAT!r}")
    if data.get("version") != VERSION:
        raise ParseError(
            f"{path} has plan version {data.get('version')!r}, this Obelisk reads {VERSION}: "
            "synthesise it again"
        )
    try:
        return _plan(data, source, binary, path)
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, ParseError):
            raise
        raise ParseError(f"{path} lacks a field, or holds a wrong one: {error!r}") from None


def _plan(data: Mapping[str, Any], source: str, binary: bytes, path: str | Path) -> Plan:
    for name, part in (("source", digest(source)), ("binary", digest(binary))):
        if data[f"{name}_digest"] != part:
            raise ParseError(f"{path} is damaged: the digest of its {name} does not match")
    return Plan(
        target=data["target"],
        host=HostIdentity.from_json(data["host"]),
        cores=data["cores"],
        model=data["model"],
        model_digest=data["model_digest"],
        weights_path=data["weights"]["path"],
        weights_digests=data["weights"]["digests"],
        tensors=tuple((n, tuple(s)) for n, s in data["tensors"]),
        workload=data["workload"],
        schedule=data["schedule"],
        edges=tuple(EdgeName(*e) for e in data["edges"]),
        barriers=tuple(data["barriers"]),
        kinds=tuple(data["kinds"]),
        layout=WeightLayout.from_json(data["layout"]),
        cache=CacheLayout(**data["cache"]),
        scratch_bytes=data["scratch_bytes"],
        frequencies=tuple(data["frequencies"]),
        eos=tuple(data["eos"]),
        tolerance=data["tolerance"],
        measured=data["measured"],
        source=source,
        binary=binary,
        judged=data.get("judged", {}),
    )
