"""Asks an engine for answers: submits everything, steps until all is finished, and sorts the events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from edgec.errors import ParityError
from edgec.runtime.abi import EventKind, Finish, StepOutcome
from edgec.runtime.events import Event, Request
from edgec.runtime.sampling import Sampling
from edgec.validation.subjects import Generated

_PATIENCE = 1000  # steps in a row that get nothing done, after which something is wrong


class Stepped(Protocol):
    """The native engine and the reference engine alike."""

    def submit(self, request: Request) -> int: ...

    def step(self) -> StepOutcome: ...

    def poll(self) -> list[Event]: ...


def answer(
    engine: Stepped,
    prompts: Sequence[Sequence[int]],
    sampling: Sequence[Sampling],
    between: Callable[[int], None] = lambda _: None,
) -> list[Generated]:
    """One answer to each prompt, computed together as far as the engine's batch allows; `n` of them for `n` > 1.

    `between` is called after each step, with the step's number.

    Raises:
        ParityError: a request failed, or the engine gets nothing done.
        EngineError: a request is refused.
    """
    made: dict[tuple[int, int], Generated] = {}
    for prompt, wanted in zip(prompts, sampling, strict=True):
        number = engine.submit(Request(tuple(prompt), wanted))
        made |= {(number, i): Generated() for i in range(wanted.n)}
    open_, fruitless, steps = set(made), 0, 0
    while open_:
        outcome = engine.step()
        steps += 1
        between(steps)
        fruitless = 0 if outcome is StepOutcome.COMMITTED else fruitless + 1
        if fruitless > _PATIENCE:
            raise ParityError(f"{_PATIENCE} steps in a row got nothing done ({outcome.name.lower()})")
        for event in engine.poll():
            key = (event.request, event.sequence)
            if event.kind is EventKind.TOKEN:
                made[key].tokens.append(event.token)
                made[key].logprobs.append(event.logprob)
            elif event.kind is EventKind.FINISH:
                if event.finish is Finish.FAILED:
                    raise ParityError("the engine failed a request while it was validated")
                made[key].cached = event.cached_tokens
                open_.discard(key)
    return [made[key] for key in sorted(made)]
