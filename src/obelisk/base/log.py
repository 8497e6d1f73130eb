"""Logging: one logger tree, `obelisk.*`, on standard error, at the level that `settings` names.

Gives a package its logger. The handler is installed once, on first use, and only on Obelisk's own
tree, so that an application's logging is left alone.
"""

from __future__ import annotations

import logging

from obelisk.base.settings import settings


def logger(name: str) -> logging.Logger:
    """The logger of one package, for example `logger("search")`."""
    root = logging.getLogger("obelisk")
    if not root.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("obelisk %(levelname)s %(name)s: %(message)s"))
        root.addHandler(handler)
        level = logging.getLevelName(settings().log_level.upper())
        root.setLevel(level if isinstance(level, int) else logging.WARNING)
    return root.getChild(name)
