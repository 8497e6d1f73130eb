"""Generation: prompts in, tokens out, several slots at once, chunk by chunk.

`Engine` wraps a `Session`. Prompts longer than a few tokens are run outside the kernel, many
positions at a time (`Session.prefill`), all but their last token; the kernel does the rest, in
launches of a bounded number of steps, so that an interrupt is answered and tokens can be shown as
they come. A sequence never exceeds the plan's context: it ends with reason "length".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from obelisk.base.errors import CallError
from obelisk.runtime import Sampling, Session, load_session

CHUNK = 32  # steps of one launch
AS_THE_SESSION_SAYS = 0
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
    """Of the latest call: steps that ran and the seconds they took, and of the prompts the tokens
    that ran outside the kernel, and their seconds.
    """

    steps: int = 0
    seconds: float = 0.0
    prefilled: int = 0
    prefill_seconds: float = 0.0


class Engine:
    """A plan that generates. Every call starts afresh: nothing is left from earlier prompts.

    `prefill_from` is the length at which a prompt is run outside the kernel (0: what the session
    finds best; None: never; never either while the session debugs, so that the kernel names what is
    not finite).
    """

    def __init__(self, session: Session, prefill_from: int | None = AS_THE_SESSION_SAYS) -> None:
        if prefill_from is not None and prefill_from < 2 and prefill_from != AS_THE_SESSION_SAYS:
            raise CallError(f"prefill_from is {prefill_from}, expected 2 or more, or None")
        self.session, self.prefill_from = session, prefill_from
        self.timing = Timing()

    @staticmethod
    def load(plan: str | Path, weights_dir: str | Path | None = None) -> Engine:
        """An engine from a plan file; raises what `load_session` raises."""
        return Engine(load_session(plan, weights_dir))

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

    def _prefill(self, pending: list[list[int]], limits: Sequence[int]) -> int:
        """Run long prompts outside the kernel, but for their last tokens; gives how many tokens."""
        least = self.prefill_from
        if least == AS_THE_SESSION_SAYS:
            least = self.session.prefill_from
        if least is None or self.session.debug:
            return 0
        feeds = [
            p[:-1] if len(p) >= least and limit else []
            for p, limit in zip(pending, limits, strict=True)
        ]
        if any(feeds):
            self.session.prefill(feeds)
        for p, feed in zip(pending, feeds, strict=True):
            del p[: len(feed)]
        return sum(map(len, feeds))

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
        feeds = [[] if r else p for p, r in zip(pending, reasons, strict=True)]
        self.session.check(feeds, limits, chosen, ends)
        start, done = time.perf_counter(), 0
        prefilled = self._prefill(pending, limits)
        decode = time.perf_counter()
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
        self.timing = Timing(done, time.perf_counter() - decode, prefilled, decode - start)
        return [Completion(tuple(m), r) for m, r in zip(made, reasons, strict=True)]
