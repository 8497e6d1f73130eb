"""Running compilers: child processes with time limits and kept logs, content-addressed results, and
loading them.

`compile_c` and `compile_many` turn C text into shared libraries; `Library` calls one on arrays.
"""

from obelisk.build.compiler import (
    Built,
    CompilerIdentity,
    compile_c,
    compile_many,
    compiler_identity,
)
from obelisk.build.library import Library

__all__ = ["Built", "CompilerIdentity", "Library", "compile_c", "compile_many", "compiler_identity"]
