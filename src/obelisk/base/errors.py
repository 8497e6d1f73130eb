"""The error classes of Obelisk, one per kind of fault.

Takes nothing; gives exception classes. Three families: `UserError` (the input is wrong or asks for
what cannot be done: the text says what was given, what is allowed, and the way out), `Infeasible`
(a candidate cannot be built on this machine: a search outcome, counted and reported, never fatal)
and `InternalError` (a fault of Obelisk).
"""

from __future__ import annotations


class ObeliskError(Exception):
    """Base of every error that Obelisk raises on purpose."""


class UserError(ObeliskError, ValueError):
    """The request is wrong; the text names the input, the limit and the way out."""


class ShapeError(UserError):
    """Shapes or axes disagree."""


class DTypeError(UserError):
    """A dtype is not supported by an operator, or two operands disagree."""


class MalformedGraph(UserError):
    """A graph breaks a rule of its level: maps that overlap or leave a gap, a value used across the
    loop, ...
    """


class ParseError(UserError):
    """A text, JSON or Mirage file does not read back; the text names file, place and reason."""


class CallError(UserError, TypeError):
    """A compiled program was called with a tensor that does not match; names the input and both
    sides.
    """


class UnknownName(UserError):
    """A program, device, operator or option name is not known; the text lists the known ones."""


class MissingDependency(ObeliskError, ImportError):
    """An optional part is not installed; the text names the extra that brings it."""


class Infeasible(ObeliskError):
    """A search-valid candidate cannot be realised on this target, and why. Counted, never fatal."""


class BuildFailed(ObeliskError):
    """A compiler refused or crashed; carries a short reason, and the path of the kept log."""

    def __init__(self, reason: str, log: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.log = log


class KernelFault(ObeliskError):
    """A running kernel stopped itself: a wait that exceeded its limit, or a result that is not
    finite; the text names core, step, layer and operator.
    """


class CacheCorrupt(ObeliskError):
    """A stored entry or file cannot be trusted. Reported and rebuilt by `cache`, never passed to a
    user.
    """


class InternalError(ObeliskError, AssertionError):
    """A fault of Obelisk itself; the text carries the offending object."""
