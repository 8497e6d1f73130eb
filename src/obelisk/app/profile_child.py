"""The process that ncu watches: two calls of a bundle of kernels on random memory.

    python -m obelisk.app.profile_child SIZES BUNDLE ORDINAL

SIZES is JSON: the bytes of each input and of each output. The first call warms up; the second is
what is counted. Inputs hold halves in fp16, so that exponentials stay finite: time and traffic do
not depend on values.
"""

from __future__ import annotations

import json
import sys

from obelisk.build.device import check, driver, ensure_context, load_bundle

_HALF = 0x3800  # 0.5 in fp16


def main(sizes: str, bundle: str, ordinal: str) -> None:
    """Call the bundle twice."""
    ensure_context(int(ordinal))
    cu = driver()

    def memory(size: int) -> int:
        address = int(check(cu.cuMemAlloc(size + 256), "taking memory"))
        check(cu.cuMemsetD16(address, _HALF, (size + 256) // 2), "filling memory")
        return address

    ins, outs = ([memory(n) for n in part] for part in json.loads(sizes))
    library = load_bundle(bundle)
    scratch = memory(library.scratch_bytes)
    library.prepare(scratch)
    for _ in range(2):
        library.launch(ins, outs, scratch, 0)
        check(cu.cuCtxSynchronize(), "running the kernels")


if __name__ == "__main__":
    main(*sys.argv[1:])
