"""`edgec run`: a bundle answers a prompt, or chats."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgec.cli.answering import Interrupt, show, summary
from edgec.cli.engine_options import (
    BundleArgument,
    ContextOption,
    DraftLengthOption,
    DraftWidthOption,
    KernelOption,
    KvOption,
    MemoryOption,
    SpeculationOption,
    ThreadsOption,
    open_engine,
)
from edgec.cli.options import JsonOption
from edgec.cli.out import out

if TYPE_CHECKING:
    from edgec.runtime.engine import Engine
    from edgec.runtime.events import Answer
    from edgec.runtime.sampling import Sampling
    from edgec.runtime.stats import Stats
    from edgec.runtime.timing import Timing

_MAX_PROMPT = 16 << 20
_SAMPLING, _ENGINE = "Sampling", "Engine"


def run(
    bundle: BundleArgument,
    prompt: Annotated[
        str | None,
        typer.Argument(
            help="What to answer; `-` reads it from stdin, as does a pipe. Without one: an interactive chat.",
            show_default=False,
        ),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat/--no-chat", help="Apply the model's chat template, or just continue the text.")
    ] = True,
    system: Annotated[str | None, typer.Option("--system", help="A system message, before the prompt.")] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=0, help="Tokens of an answer at most; 0: until the context is full.")
    ] = 512,
    temperature: Annotated[
        float,
        typer.Option(
            "--temperature",
            min=0,
            help="0 takes the likeliest token each time, so that equal prompts have equal answers; "
            "0.7 is a common choice for livelier text.",
            rich_help_panel=_SAMPLING,
        ),
    ] = 0.0,
    top_k: Annotated[
        int, typer.Option("--top-k", min=0, help="Only the k likeliest tokens; 0: all.", rich_help_panel=_SAMPLING)
    ] = 0,
    top_p: Annotated[
        float,
        typer.Option("--top-p", help="Only the likeliest tokens that add up to this.", rich_help_panel=_SAMPLING),
    ] = 1.0,
    min_p: Annotated[
        float,
        typer.Option(
            "--min-p", help="Only tokens at least this fraction as likely as the likeliest.", rich_help_panel=_SAMPLING
        ),
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option("--repetition-penalty", help="1: none.", rich_help_panel=_SAMPLING)
    ] = 1.0,
    frequency_penalty: Annotated[
        float, typer.Option("--frequency-penalty", help="−2 to 2; 0: none.", rich_help_panel=_SAMPLING)
    ] = 0.0,
    presence_penalty: Annotated[
        float, typer.Option("--presence-penalty", help="−2 to 2; 0: none.", rich_help_panel=_SAMPLING)
    ] = 0.0,
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed",
            help="Of the random numbers. [default: another each time; --json has it]",
            rich_help_panel=_SAMPLING,
        ),
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option("--stop", help="Text that ends the answer; may be given again.", rich_help_panel=_SAMPLING),
    ] = None,
    n: Annotated[
        int, typer.Option("-n", min=1, help="Answers to the one prompt, computed together.", rich_help_panel=_SAMPLING)
    ] = 1,
    logprobs: Annotated[
        int | None,
        typer.Option("--logprobs", min=0, max=20, help="With --json: log-probabilities and so many alternatives."),
    ] = None,
    threads: ThreadsOption = 0,
    kernel: KernelOption = None,
    kv: KvOption = "int8",
    memory: MemoryOption = None,
    context: ContextOption = 0,
    speculation: SpeculationOption = "auto",
    draft_length: DraftLengthOption = 0,
    draft_width: DraftWidthOption = 0,
    stats: Annotated[bool, typer.Option("--stats", help="Speed, and the four wastes, on stderr at the end.")] = False,
    json: JsonOption = False,
) -> None:
    """Answer a prompt with a bundle, or chat with it.

    The answer goes to stdout as it is computed. Ctrl-C stops the answer, twice leaves.
    """
    out.json = json
    out.interrupted = "interrupted"
    from edgec.errors import UsageError
    from edgec.runtime.sampling import Sampling

    sampling = Sampling(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        seed=seed,
        stop=tuple(stop or ()),
        n=n,
        logprobs=logprobs,
    )
    _check(sampling, json=json, system=system, chat=chat)
    text = _prompt(prompt)
    if text is None and (json or n > 1 or not chat):
        raise UsageError("there is no prompt", hint="give one as an argument or on stdin; chatting is for a terminal")
    with open_engine(
        bundle,
        threads=threads,
        kernel=kernel,
        kv=kv,
        memory=memory,
        context=context,
        speculation=speculation,
        draft_length=draft_length,
        draft_width=draft_width,
    ) as engine:
        if text is None:
            from edgec.cli.conversation import converse

            converse(engine, sampling, system=system, stats=stats)
            return
        _answer(engine, _tokens(engine, text, chat=chat, system=system), sampling, stats=stats)


def _check(sampling: Sampling, *, json: bool, system: str | None, chat: bool) -> None:
    from edgec.errors import UsageError

    if sampling.temperature == 0:
        for name, value, none in (
            ("--top-k", sampling.top_k, 0),
            ("--top-p", sampling.top_p, 1.0),
            ("--min-p", sampling.min_p, 0.0),
        ):
            if value != none:
                raise UsageError(f"{name} changes nothing at temperature 0", hint="give --temperature too")
    if sampling.logprobs is not None and not json:
        raise UsageError("--logprobs is only for --json")
    if system is not None and not chat:
        raise UsageError("--system needs the chat template, which --no-chat leaves out")


def _prompt(given: str | None) -> str | None:
    """The prompt, from the argument or a pipe; None on a terminal."""
    from edgec.errors import UsageError

    if given is not None and given != "-":
        return given
    if given is None and sys.stdin.isatty():
        return None
    raw = sys.stdin.buffer.read(_MAX_PROMPT + 1)
    if len(raw) > _MAX_PROMPT:
        raise UsageError(f"the prompt on stdin has more than {_MAX_PROMPT} bytes")
    try:
        text = raw.decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UsageError(f"the prompt on stdin is not UTF-8 (byte {error.start})") from error
    if not text:
        raise UsageError("the prompt on stdin is empty")
    return text


def _tokens(engine: Engine, text: str, *, chat: bool, system: str | None) -> list[int]:
    if not chat:
        return engine.encode_prompt(text)
    from edgec.runtime.chat import Chat, Message

    messages = [*([Message("system", system)] if system is not None else []), Message("user", text)]
    return Chat.of(engine).tokens(messages)


def _answer(engine: Engine, tokens: list[int], sampling: Sampling, *, stats: bool) -> None:
    from edgec.errors import ExitCode
    from edgec.runtime.events import Answer
    from edgec.runtime.timing import Timing

    sampling = sampling.with_seed()
    before, timing = engine.stats(), Timing()
    answers = [Answer() for _ in range(sampling.n)]
    alternatives: list[list[Any]] = [[] for _ in answers]
    streaming = sampling.n == 1 and not out.json
    with Interrupt() as interrupt:
        for event in interrupt.events(engine, tokens, sampling):
            timing.add(event)
            answers[event.sequence].add(event)
            if event.top:
                alternatives[event.sequence].append([{"token": t, "logprob": p} for t, p in event.top])
            if streaming:
                show(event.text)
    if streaming:
        show("\n")
    elif not out.json:
        for i, answer in enumerate(answers, 1):
            show(f"--- {i}\n{answer.text}\n")
    now = engine.stats().since(before)
    out.document(_document(engine, answers, alternatives, sampling, timing, now))
    if timing.tokens and answers[0].finish.name == "LENGTH" and not out.json:
        out.progress("(cut at --max-tokens, or where the context is full)")
    if stats:
        for line in summary(engine, timing, now):
            out.progress(line)
    if interrupt.stopped:
        raise typer.Exit(int(ExitCode.INTERRUPTED))


def _document(
    engine: Engine,
    answers: list[Answer],
    alternatives: list[list[Any]],
    sampling: Sampling,
    timing: Timing,
    stats: Stats,
) -> dict[str, Any]:
    from edgec.runtime.locate import bundle_name

    scored = sampling.logprobs is not None
    return {
        "model": bundle_name(engine.folder),
        "answers": [
            {
                "text": a.text,
                "finish": a.finish.name.lower(),
                "tokens": a.tokens,
                **({"logprobs": a.logprobs, "alternatives": top} if scored else {}),
            }
            for a, top in zip(answers, alternatives, strict=True)
        ],
        "seed": sampling.seed,
        "usage": {
            "prompt_tokens": timing.prompt_tokens,
            "cached_tokens": timing.cached_tokens,
            "answer_tokens": timing.answer_tokens,
        },
        "seconds_to_first_token": timing.first_token_seconds,
        "tokens_per_second": timing.answer_rate,
        "waste": {
            "kv_utilisation": stats.utilisation,
            "step_occupancy": stats.occupancy,
            "scheduling": stats.scheduling,
            "recomputed": stats.recomputed,
        },
        "engine": engine.description,
    }
