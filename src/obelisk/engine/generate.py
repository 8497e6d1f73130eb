"""Generation: prompts in, tokens out, several slots at once, chunk by chunk.

`Engine` wraps a `Session`. Prompts run through the same kernel as new tokens do (its prefill), in
launches of a bounded number of steps, so that an interrupt is answered and tokens can be shown as
they come. A sequence never exceeds the plan's context: it ends with reason "length".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from obelisk.base.errors import CallError
from obelisk.runtime import Sampling, Session

CHUNK = 32  # steps of one launch
_ALL_STOPS = 8
GREEDY = Sampling()


@dataclass(frozen=True, slots=True)
class Completion:
    """One sequence's result.

    Attributes:
        tokens: the new token ids; a stop token is the last of them.
        reason: "stop" or "length" (the limit asked for, or the plan's context).
    """

    tokens: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Timing:
    """Of the latest call: steps that ran and the seconds they took, prompts included."""

    steps: int = 0
    seconds: float = 0.0


class Engine:
    """A plan that generates. Every call starts afresh: nothing is left from earlier prompts."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.timing = Timing()

    @staticmethod
    def load(plan: str | Path, weights_dir: str | Path | None = None) -> Engine:
        """An engine from a plan file; raises what `Session.load` raises."""
        return Engine(Session.load(plan, weights_dir))

    def _limits(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[int]:
        context = self.session.plan.context
        if not prompts:
            raise CallError("generate needs at least one prompt")
        if max_tokens < 1:
            raise CallError(f"max_tokens is {max_tokens}, expected 1 or more")
        for i, prompt in enumerate(prompts):
            if not prompt:
                raise CallError(f"prompt {i} is empty: a prompt needs at least one token")
            if len(prompt) > context:
                raise CallError(
                    f"prompt {i} has {len(prompt)} tokens, the plan's context is {context}"
                )
        return [min(max_tokens, context - len(p)) for p in prompts]

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int = 128,
        *,
        sampling: Sampling | Sequence[Sampling] = GREEDY,
        stops: Sequence[int] | None = None,
        on_token: Callable[[int, int], None] | None = None,
        steps: int = CHUNK,
    ) -> list[Completion]:
        """Continue each prompt (token ids) by up to `max_tokens`.

        `stops` defaults to the model's end-of-sequence ids; `on_token(prompt, token)` is called as
        tokens come; `steps` bounds one launch. Raises `CallError` for a prompt that is empty, too
        long, or holds an unknown id, and for more prompts than the plan's batch.
        """
        limits = self._limits(prompts, max_tokens)
        ends = self.session.plan.eos[:_ALL_STOPS] if stops is None else tuple(stops)
        chosen = [sampling] * len(prompts) if isinstance(sampling, Sampling) else list(sampling)
        self.session.reset()
        made: list[list[int]] = [[] for _ in prompts]
        reasons = ["length" if limit == 0 else "" for limit in limits]
        pending = [list(p) for p in prompts]
        start, done = time.perf_counter(), 0
        while not all(reasons):
            feeds = [[] if r else p for p, r in zip(pending, reasons, strict=True)]
            want = [limit - len(m) for limit, m in zip(limits, made, strict=True)]
            before = self.session.position.copy()
            runs = self.session.launch(feeds, want, chosen, ends, steps)
            done += self.session.steps_done
            for i, run in enumerate(runs):
                if reasons[i]:
                    continue
                made[i] += run.tokens
                if on_token is not None:
                    for token in run.tokens:
                        on_token(i, token)
                fed = int(self.session.position[i] - before[i])
                rest = pending[i][min(fed, len(pending[i])) :]
                pending[i] = rest or made[i][-1:]
                reasons[i] = run.reason
        self.timing = Timing(done, time.perf_counter() - start)
        return [Completion(tuple(m), r) for m, r in zip(made, reasons, strict=True)]
