"""A compiled program: what `optimize` returns and users call.

Takes numpy arrays or torch tensors (for a CUDA device torch tensors on it), checks them against the
program's signature, and runs the kernels on their memory without a copy. It promises a right answer
or a `CallError`, results of the kind that was given, that calls from several threads at once do not
share scratch memory, and an export that gives the same bits in another process on the same kind of
machine.
"""

from __future__ import annotations

import json
import os
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from obelisk.app.backends import backend_of
from obelisk.app.calls import Tensor
from obelisk.app.doctor import obelisk_version
from obelisk.app.report import Report, render_html
from obelisk.base.digest import digest
from obelisk.base.errors import ParseError, UserError
from obelisk.base.log import logger
from obelisk.base.settings import settings
from obelisk.ir import Graph
from obelisk.ir.text import parse, to_text
from obelisk.verify import JudgeResult, Verdict, VerdictKind

FORMAT = 2
# What zipfile raises for damage, depending on where it is.
_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    NotImplementedError,
    RuntimeError,
    ValueError,
)
_META, _SOURCE, _PROGRAM, _CHOSEN = (
    "meta.json", "source.txt", "program.txt", "chosen.txt",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Artifact:
    """Everything a compiled program consists of, as it is stored and exported.

    Attributes:
        program, graph: what was asked for, and what was chosen.
        verdict: the judges' answer for `graph`.
        source: the generated text.
        files: what was built from it, by file name.
        backend, target: which back end runs it, and what that needs of a machine.
        scratch_bytes: scratch memory of one call.
        threads: threads it was tuned for.
        report: the account of the run.
    """

    program: Graph
    graph: Graph
    verdict: Verdict
    source: str
    files: dict[str, bytes]
    backend: str
    target: dict[str, Any]
    scratch_bytes: int
    threads: int
    report: Report


class Compiled:
    """A callable program. Make one with `optimize` or `load`.

    >>> best = optimize(g)            # doctest: +SKIP
    >>> y = best(q, k, v)             # doctest: +SKIP
    """

    def __init__(self, artifact: Artifact, path_of: Callable[[str], Path]) -> None:
        """`path_of` gives the file that holds a binary part of the artifact."""
        self._artifact = artifact
        self._runner = backend_of(artifact.backend).runner(artifact, path_of)

    artifact = property(lambda self: self._artifact, doc="All parts, as they are stored.")
    program = property(lambda self: self._artifact.program, doc="The program as it was given.")
    graph = property(lambda self: self._artifact.graph, doc="The chosen graph.")
    verdict = property(lambda self: self._artifact.verdict, doc="What the judges said of it.")
    report = property(lambda self: self._artifact.report, doc="The account of the run.")
    source = property(lambda self: self._artifact.source, doc="The generated text.")
    candidates = property(lambda self: self.report.candidates, doc="All that was looked at.")
    baselines = property(
        lambda self: {b.name: b.time_us for b in self.report.baselines},
        doc="Median microseconds of one call, by name; `op_by_op` always.",
    )

    def __repr__(self) -> str:
        return f"<Compiled {self._runner.text}: {self.report.sentence()}>"

    def __call__(self, *tensors: Tensor, out: Tensor | None = None) -> Any:
        """Run on one tensor per input; gives one tensor, or a tuple for several outputs.

        `out` takes the results' place: tensors of the outputs' shapes and dtypes that share no
        memory with an input. Raises `CallError` for what does not match; nothing has run then.
        """
        return self._runner.call(tensors, out)

    def html(self) -> str:
        """The report as one self-contained page."""
        from obelisk.ir.svg import to_svg  # only here: it needs a layout library

        picture = to_svg(self.graph).partition("?>")[2]  # inside a page the XML declaration is none
        return render_html(self.report, picture, to_text(self.graph))

    def save(self, path: str | Path) -> Path:
        """Export to one file that `load` reads, also in another process; gives its path."""
        target = Path(path)
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as file:
            for name, data in pack(self._artifact).items():
                file.writestr(name, data)
        return target


def pack(artifact: Artifact) -> dict[str, bytes]:
    """An artifact as named files."""
    meta = {
        "format": FORMAT,
        "version": obelisk_version(),
        "backend": artifact.backend,
        "target": artifact.target,
        "digests": {name: digest(data) for name, data in sorted(artifact.files.items())},
        "scratch_bytes": artifact.scratch_bytes,
        "threads": artifact.threads,
        "verdict": _verdict_to_json(artifact.verdict),
        "report": artifact.report.to_json(),
    }
    return {
        _META: json.dumps(meta, indent=1, sort_keys=True).encode(),
        _PROGRAM: to_text(artifact.program).encode(),
        _CHOSEN: to_text(artifact.graph).encode(),
        _SOURCE: artifact.source.encode(),
        **artifact.files,
    }


def _verdict_to_json(verdict: Verdict) -> dict[str, Any]:
    return {**asdict(verdict), "kind": verdict.kind.value}


def _verdict_from_json(data: dict[str, Any]) -> Verdict:
    judges = tuple(JudgeResult(**j) for j in data["judges"])
    return Verdict(**{**data, "kind": VerdictKind(data["kind"]), "judges": judges})


def unpack(files: dict[str, bytes], where: str) -> Artifact:
    """Read `pack` back; raises `ParseError` for damage, `UserError` for another machine."""
    try:
        meta = json.loads(files[_META])
        if meta["format"] != FORMAT:
            raise ParseError(f"{where}: format {meta['format']}, this version reads {FORMAT}")
        binary = {name: files[name] for name in meta["digests"]}
        for name, data in binary.items():
            if digest(data) != meta["digests"][name]:
                raise ParseError(f"{where}: {name} in it is damaged: export it again")
        backend_of(meta["backend"]).admit(meta["target"], where)
        return Artifact(
            program=parse(files[_PROGRAM].decode()),
            graph=parse(files[_CHOSEN].decode()),
            verdict=_verdict_from_json(meta["verdict"]),
            source=files[_SOURCE].decode(),
            files=binary,
            backend=meta["backend"],
            target=meta["target"],
            scratch_bytes=int(meta["scratch_bytes"]),
            threads=int(meta["threads"]),
            report=Report.from_json(meta["report"]),
        )
    except (KeyError, ValueError, TypeError) as error:
        if isinstance(error, UserError):
            raise
        raise ParseError(f"{where} does not read as a compiled program: {error}") from error


def materialise(artifact: Artifact) -> Compiled:
    """Put binary parts, as far as they are needed in files, under their content digests: in the
    cache or else in temp.
    """

    def path_of(name: str) -> Path:
        data = artifact.files[name]
        file, folder = f"{digest(data)}{Path(name).suffix}", settings().cache_dir / "loaded"
        try:
            return _place(folder, file, data)
        except OSError as error:
            spare = Path(tempfile.gettempdir()) / f"obelisk-{os.getuid()}"
            text = "cannot write %s (%s); using %s"
            logger("app").warning(text, folder, error.strerror, spare)
            return _place(spare, file, data)

    return Compiled(artifact, path_of)


def _place(folder: Path, name: str, data: bytes) -> Path:
    """A file with this content; another process may be writing the same one."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / name
    if not path.is_file() or path.read_bytes() != data:
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as part:
            part.write(data)
        Path(part.name).replace(path)
    return path


def load(path: str | Path) -> Compiled:
    """Read what `Compiled.save` wrote; raises `ParseError` or `UserError` naming the file."""
    try:
        with zipfile.ZipFile(path) as file:
            files = {name: file.read(name) for name in file.namelist()}
    except (*_DAMAGE, OSError) as error:
        raise ParseError(f"{path} does not read as a compiled program: {error}") from error
    return materialise(unpack(files, str(path)))
