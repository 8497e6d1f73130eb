"""The command line's entry point: runs a command and turns what it raises into an exit code.

0: done; 1: done, and the answer is no; 2: the request is wrong or cannot be done here; 3: a fault
of Obelisk; 130: stopped by the user.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence

from obelisk.app.cli import app
from obelisk.base.errors import InternalError, ObeliskError

OK, NEGATIVE, WRONG, INTERNAL, INTERRUPTED = 0, 1, 2, 3, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: this process's) and give the exit code."""
    try:
        app(args=list(sys.argv[1:] if argv is None else argv), prog_name="obelisk")
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else WRONG if leaving.code else OK
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()  # the reader went away; nobody is left to tell
        return OK
    except InternalError as error:
        return _report_fault(error)
    except (ObeliskError, OSError) as error:
        text = " ".join(str(error).split())
        print(f"error: {text or type(error).__name__}", file=sys.stderr)
        return WRONG
    except Exception as error:
        return _report_fault(error)
    return OK


def _report_fault(error: Exception) -> int:
    traceback.print_exception(error)
    print(
        "internal error: this is a fault of Obelisk. Please report it with the text above, the "
        "command, and the output of `obelisk doctor`.",
        file=sys.stderr,
    )
    return INTERNAL


def script() -> None:
    """The `obelisk` command."""
    sys.exit(main())


if __name__ == "__main__":
    script()
