"""Answers in the cache: the key of a request, and artifacts in and out of the store.

Takes what a request depends on; gives a `Compiled` or nothing. It promises that an entry that does
not read as a whole is a miss with a warning, and that a hit carries the caller's own names.
"""

from __future__ import annotations

import json
from dataclasses import replace

from obelisk.app.compiled import Artifact, Compiled, pack, unpack
from obelisk.app.request import Request
from obelisk.base.errors import UserError
from obelisk.base.log import logger
from obelisk.cache import CacheKey, Store, cache_key


def key_of(request: Request) -> CacheKey:
    """Everything that changes the answer to a request."""
    options = {
        "space": request.space.key,
        "seed": request.seed,
        "threads": request.threads,
        "baselines": request.baselines,
        "without": request.without,
    }
    return cache_key(
        request.program,
        space=json.dumps(options, sort_keys=True),
        budget_seconds=request.budget,
        machine=request.machine,
        compiler=request.toolchain,
        verification=request.verify_level,
        device=request.device,
    )


def fetch(key: CacheKey, request: Request) -> Compiled | None:
    """The stored answer, or None."""
    entry = Store.open().get(key)
    if entry is None:
        return None
    try:
        files = {name: path.read_bytes() for name, path in entry.artefacts.items()}
        files |= {name: str(text).encode() for name, text in entry.payload.items()}
        artifact = unpack(files, f"cache entry {key.digest}")
        program = request.program
        if artifact.program.digest != program.digest:
            raise UserError("it answers another program")
        report = replace(artifact.report, program=program.name, cached=True)
        answer = replace(artifact, program=program, report=report)
        return Compiled(answer, entry.artefacts.__getitem__)
    except (UserError, OSError, KeyError) as error:
        logger("app").warning("cache entry %s is not used: %s", key.digest, error)
        return None


def keep(key: CacheKey, artifact: Artifact) -> None:
    """Store an answer; a store that cannot be written is a warning."""
    files = pack(artifact)
    binary = {name: files.pop(name) for name in artifact.files}
    Store.open().put(
        key,
        {name: data.decode() for name, data in files.items()},
        binary,
        name=artifact.program.name,
    )
