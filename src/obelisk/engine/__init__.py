"""Generation with a plan: prompts, sampling, batches, limits, text.

`Engine` and `Tokenizer` are the way in; a server and other engines' plug-ins build on them.
"""

from obelisk.engine.generate import Completion, Engine, Timing
from obelisk.engine.text import Tokenizer
from obelisk.runtime import Sampling

__all__ = ["Completion", "Engine", "Sampling", "Timing", "Tokenizer"]
