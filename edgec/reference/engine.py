"""Requests in, events out: where scheduler, model and sampler meet.

    engine = ReferenceEngine(model, tokenizer, ReferenceOptions(), eos=(2,))
    [[answer]] = engine.answer([tokens], Sampling(max_tokens=32))

The surface is that of `edgec.runtime.engine.Engine`, so that `edgec.runtime.driver.Driver` steps either. One lock
guards requests, scheduler and events; a step holds it while it plans and while it commits, not while the model runs, so
`submit` and `cancel` never wait for a forward pass. All methods may be called from any thread.
"""

from __future__ import annotations

import copy
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from edgec.architectures.draft_head import Head
from edgec.architectures.llama import Llama
from edgec.errors import UsageError
from edgec.reference.block_manager import BlockManager
from edgec.reference.exact import ExactRunner
from edgec.reference.exact_head import ExactHead
from edgec.reference.model_runner import Batch, ModelRunner, Rows
from edgec.reference.options import ReferenceOptions
from edgec.reference.philox import seed_of
from edgec.reference.request import Answer, OpenRequest
from edgec.reference.sampler import History, Proposal, check_sampling, has_penalties
from edgec.reference.scheduler import Scheduler, Step
from edgec.reference.sequence import Sequence as Running
from edgec.reference.sequence import State
from edgec.reference.speculation import Drafter, HeadRunner, check_head, may_speculate
from edgec.reference.text import StopStrings, TextTokenizer
from edgec.reference.uses import Result, Score, Use, counted, heirs, rows_of, use_rows, uses_of
from edgec.runtime.abi import Finish, Status, StepOutcome, Trim
from edgec.runtime.events import Answer as Collected
from edgec.runtime.events import Event, Request, collect
from edgec.runtime.failures import EngineError
from edgec.runtime.sampling import Sampling
from edgec.runtime.stats import Stats

HEAD_ROWS = 64  # that go through the head at a time: logits of a vocabulary are large
RECENT = 256  # steps whose times are kept for percentiles
PRIORITIES = range(-8, 8)


class ReferenceEngine:
    """A model that answers requests."""

    def __init__(
        self,
        model: Llama,
        tokenizer: TextTokenizer | None,
        options: ReferenceOptions,
        *,
        eos: Sequence[int] = (),
        quantised: Collection[str] = (),
        draft: Head | None = None,
    ) -> None:
        """
        Args:
            model: float32; it is left as it is, and may be used by several engines.
            tokenizer: for text and stop strings; without one, events have tokens only.
            eos: tokens that end an answer.
            quantised: names of the linear layers that `activations="int8"` is about.
            draft: the model's draft head, for `speculation` "head" and "both".

        Raises:
            EngineError: the options don't fit the model or the memory.
        """
        trained = model.config.max_positions
        context = options.context or trained
        if context > trained:
            raise _bad(f"context is {context}, and the model was made for {trained} positions")
        self.options = options
        self.eos = frozenset(eos)
        self.failure = ""
        """What the latest step failed at."""
        self._tokenizer = tokenizer
        self._runner = (
            ExactRunner(model, options, context, quantised=quantised)
            if options.activations == "int8"
            else ModelRunner(model, options, context)
        )
        self._drafter = Drafter(options, self._head(draft), self._runner.model.embed_tokens)
        self._manager = BlockManager(self._runner.blocks, options.block_size)
        self._capacity = min(context, self._runner.blocks * options.block_size)
        self._scheduler = Scheduler(
            self._manager,
            max_batch=options.max_batch,
            step_tokens=options.step_tokens,
            prefix_cache=options.prefix_cache,
        )
        self.context = context
        """Positions that a sequence may have."""
        self._lock = threading.Lock()
        self._turn = threading.Lock()  # who steps, or scores
        self._closed = False
        self._requests: dict[int, OpenRequest] = {}
        self._answers: dict[Running, Answer] = {}
        self._events: deque[Event] = deque()
        self._next = 1
        self._finished = self._cancelled = self._failures = 0
        self._step_seconds = self._forward_seconds = self._sample_seconds = 0.0
        self._recent: deque[float] = deque(maxlen=RECENT)

    def _head(self, draft: Head | None) -> HeadRunner | None:
        """The draft head as this engine computes it, if it needs one."""
        head = check_head(draft, self.options)
        if head is None:
            return None
        own = copy.deepcopy(head).to(self._runner.device).float().eval()
        return ExactHead(own) if self.options.activations == "int8" else own

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every request and give the memory back. May be called again; other calls are refused from here on."""
        with self._turn, self._lock:
            if self._closed:
                return
            self._closed = True
            for request in list(self._requests.values()):
                self._end_all(request, Finish.CANCELLED)
            self._runner.pools.clear()

    # ---- Requests

    def submit(self, request: Request) -> int:
        """Queue a request; gives its number. From any thread.

        Raises:
            UsageError: a number that doesn't fit its field.
            EngineError: it is refused, with the native engine's status: an option is wrong, it is too long, or the
                queue is full. A tenant's weight other than 1 is UNSUPPORTED: there is no fair queueing here.
        """
        prompt = self._checked(request)
        sampling = request.sampling
        with self._lock:
            self._open()
            if len(self._scheduler.waiting) >= self.options.max_waiting:
                raise EngineError(Status.QUEUE_FULL, f"{self.options.max_waiting} requests wait already")
            number, self._next = self._next, self._next + 1
            seed = sampling.seed if sampling.seed is not None else seed_of(number)
            opened = OpenRequest(number, request, prompt, seed, self.eos)
            seen = frozenset(prompt) if has_penalties(sampling) else frozenset()
            for index in range(sampling.n):
                detokenizer = self._tokenizer.detokenizer() if self._tokenizer is not None else None
                opened.answers.append(Answer(opened, index, History(seen), StopStrings(sampling.stop), detokenizer))
            most = len(prompt) + sampling.max_tokens if sampling.max_tokens else self._capacity
            sequence = Running(
                (number, 0),
                list(prompt),
                len(prompt),
                min(most, self._capacity),
                priority=request.priority,
                places=sampling.n,
                salt=request.cache_salt,
                compute_all=request.score_prompt,
            )
            self._requests[number] = opened
            self._place(opened.answers[0], sequence)
            self._scheduler.add(sequence)
        return number

    def _checked(self, request: Request) -> list[int]:
        """The prompt of a request that can run."""
        vocab, sampling = self._runner.config.vocab_size, request.sampling
        prompt = [int(token) for token in request.tokens]
        if not prompt:
            raise _bad("the prompt has no tokens")
        for token in prompt:
            if not 0 <= token < vocab:
                raise _bad(f"token {token} of the prompt is not in the vocabulary of {vocab}")
        if request.priority not in PRIORITIES:
            raise _bad("priority must be in -8…7")
        check_sampling(sampling, vocab)
        if sampling.n > self.options.max_batch:
            raise _bad(f"n is {sampling.n}, and max_batch is {self.options.max_batch}")
        if sampling.stop and self._tokenizer is None:
            raise EngineError(Status.UNSUPPORTED, "stop strings need a tokenizer, and this model came without one")
        if request.tenant_weight not in (0, 1):
            raise EngineError(
                Status.UNSUPPORTED,
                f"tenant_weight is {request.tenant_weight:g}: the reference serves in order, and knows no weights",
            )
        if not 0 <= request.cache_salt < 2**64:
            raise UsageError(f"cache_salt: {request.cache_salt} does not fit 64 bits")
        if len(prompt) + 1 > self._capacity:
            raise EngineError(
                Status.TOO_LONG,
                f"a prompt of {len(prompt)} tokens leaves no room for an answer in a context of {self._capacity}",
            )
        return prompt

    def cancel(self, number: int) -> bool:
        """Cancel in any state; its last event says so. False when it has finished already. From any thread."""
        with self._lock:
            request = self._requests.get(number)
            if request is None:
                return False
            self._end_all(request, Finish.CANCELLED)
        return True

    def _place(self, answer: Answer, sequence: Running) -> None:
        answer.sequence = sequence
        self._answers[sequence] = answer

    def _end(self, answer: Answer, finish: Finish) -> None:
        """The answer's last event; its blocks are back."""
        if answer.sequence is not None:
            self._scheduler.finish(answer.sequence)
            self._answers.pop(answer.sequence, None)
        if finish in (Finish.CANCELLED, Finish.FAILED):
            self._cancelled += 1
        else:
            self._finished += 1
        answer.finished = True
        self._events.append(answer.last_event(finish))
        if answer.owner.finished:
            self._requests.pop(answer.owner.number, None)

    def _end_all(self, request: OpenRequest, finish: Finish) -> None:
        for answer in request.answers:
            if not answer.finished:
                self._end(answer, finish)

    # ---- A step

    def step(self) -> StepOutcome:
        """Run one iteration: plan, reserve, run, commit. What fails is what was in the step; the pool stays whole."""
        with self._turn:
            started = time.perf_counter()
            try:
                proposals = self._propose()
            except Exception as error:  # noqa: BLE001 - as below, of the draft head
                with self._lock:
                    self._fail([s for s in self._scheduler.running if s.pending == 1], error)
                return StepOutcome.FAILED
            with self._lock:
                self._open()
                proposed = {a.sequence: len(p) for a, p in proposals.items() if a.sequence is not None}
                step = self._scheduler.schedule(proposed)
                if step is None:
                    return StepOutcome.DEFERRED if self._scheduler.waiting else StepOutcome.IDLE
                uses, pieces = list[Use](), list[Rows]()
                for chunk in step.chunks:
                    answer = self._answers[chunk.sequence]
                    own = uses_of(chunk, answer, proposals.get(answer, ()))
                    uses += own
                    pieces.append(rows_of(chunk, own, proposals.get(answer, ())))
            try:
                self._runner.copy_blocks(step.copies)
                hidden, results = self._compute(self._runner.batch(pieces), uses)
            except Exception as error:  # noqa: BLE001 - whatever the model raises ends those in the step, and only them
                with self._lock:
                    self._fail([chunk.sequence for chunk in step.chunks], error)
                return StepOutcome.FAILED
            with self._lock:
                rows = counted(uses, results)
                self._learn([(uses[row], hidden[row]) for row in rows if not uses[row].scores])
                self._commit(step, [uses[row] for row in rows], [results[row] for row in rows])
                seconds = time.perf_counter() - started
                self._step_seconds += seconds
                self._recent.append(seconds)
        return StepOutcome.COMMITTED

    def _propose(self) -> dict[Answer, list[Proposal]]:
        """Proposals for those who decode; the head runs without the lock, too."""
        if not self._drafter.active:
            return {}
        with self._lock:
            candidates = [
                (answer, list(sequence.tokens), sequence.room - 1)
                for sequence, answer in self._answers.items()
                if sequence.state is State.RUNNING
                and sequence.pending == 1
                and len(heirs(answer)) == 1
                and may_speculate(answer.owner.request.sampling, head=self._drafter.wants_hidden)
            ]
        return self._drafter.propose(candidates)

    def _learn(self, rows: Sequence[tuple[Use, torch.Tensor]]) -> None:
        """What became of proposals, and the states that the next ones start from; of rows that count, in order."""
        for use, hidden in {use.chunk: (use, hidden) for use, hidden in rows}.values():  # each sequence's last row
            if use.chunk.drafts:
                self._drafter.verified(use.chunk.drafts, use.place)
            if self._drafter.wants_hidden:
                for answer in heirs(use.answer):
                    answer.hidden = hidden.float().clone()

    def _compute(self, batch: Batch, uses: Sequence[Use]) -> tuple[torch.Tensor, list[Result]]:
        """The model and the sampler, without the lock: nothing that is read here changes meanwhile.

        Returns:
            Hidden states (R, hidden) of the wanted rows, and what was made of each.
        """
        started = time.perf_counter()
        hidden = self._runner.forward(batch)
        sampling, results = 0.0, list[Result]()
        for first in range(0, len(uses), HEAD_ROWS):
            logits = self._runner.logits(hidden[first : first + HEAD_ROWS])
            if self._runner.device.type == "cuda":
                torch.cuda.synchronize(self._runner.device)
            projected = time.perf_counter()
            results.extend(use_rows(logits, uses[first : first + HEAD_ROWS]))
            sampling += time.perf_counter() - projected
        self._sample_seconds += sampling
        self._forward_seconds += time.perf_counter() - started - sampling
        return hidden, results

    def _commit(self, step: Step, uses: Sequence[Use], results: Sequence[Result]) -> None:
        """Take in what the step gave; nothing of what was cancelled meanwhile, nor of what comes after an end."""
        self._end_broken(uses, results)
        said: dict[Running, list[_Said]] = {}
        for use, result in zip(uses, results, strict=True):
            request = use.answer.owner
            if use.answer.finished or result is None:
                continue
            if isinstance(result, Score):
                self._events.extend(request.score_events(use.position + 1, result.logprob, result.top))
                request.scored = use.position + 1
                continue
            parts = said.setdefault(use.chunk.sequence, [])
            if parts and parts[-1].finish is not Finish.NONE:
                continue
            room = use.chunk.sequence.room - 1 - len(parts)
            parts += [
                _Said(answer, sampled.token, *answer.say(sampled, use.position + 1, room))
                for answer, sampled in zip(heirs(use.answer), result, strict=True)
                if sampled is not None
            ]
        self._scheduler.commit(step, {sequence: _own_tokens(parts) for sequence, parts in said.items()})
        for sequence, parts in said.items():
            sequence.places = 1
            for part in parts:
                if part.answer.sequence is None and part.finish is Finish.NONE:
                    self._fork(sequence, part.answer, part.token)
            for part in parts:
                if part.event is not None:
                    self._events.append(part.event)
                if part.finish is not Finish.NONE:
                    self._end(part.answer, part.finish)
                part.answer.owner.forked = True

    def _fork(self, parent: Running, answer: Answer, token: int) -> None:
        """The prompt of a request with n answers is computed: another one goes on from its blocks."""
        prompt = answer.owner.prompt
        child = Running(
            (answer.owner.number, answer.index),
            [*prompt, token],
            len(prompt),
            parent.max_total,
            priority=parent.priority,
            salt=parent.salt,
        )
        self._scheduler.fork(parent, child)
        self._place(answer, child)

    def _end_broken(self, uses: Sequence[Use], results: Sequence[Result]) -> None:
        """Requests whose logits are no numbers. What they computed must not be found by anyone else."""
        for use, result in zip(uses, results, strict=True):
            broken = result is None or (isinstance(result, list) and None in result)
            if not broken or use.answer.finished:
                continue
            self.failure = f"request {use.answer.owner.number}: the model gave a logit that is no number"
            self._failures += 1
            for answer in use.answer.owner.answers:
                if answer.sequence is not None and not answer.finished:
                    self._scheduler.forget(answer.sequence)
            self._end_all(use.answer.owner, Finish.FAILED)

    def _fail(self, sequences: Sequence[Running], error: Exception) -> None:
        """The model failed: nothing of the step counts, and whoever was in it ends, so that the others can go on."""
        self.failure = f"{type(error).__name__}: {error}"
        self._failures += 1
        for sequence in sequences:
            answer = self._answers.get(sequence)
            if answer is not None:
                self._end_all(answer.owner, Finish.FAILED)

    def poll(self) -> list[Event]:
        """What has happened since the last call, in order."""
        with self._lock:
            events, self._events = list(self._events), deque()
        return events

    # ---- Without events

    def answer(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling | None = None, **request: Any
    ) -> list[list[Collected]]:
        """All answers to all prompts, computed together: for each prompt, `n` of them. Steps the engine itself.

        Raises:
            EngineError: a prompt is refused, or the model failed.
        """
        wanted = sampling or Sampling()
        numbers: list[int] = []
        try:
            for prompt in prompts:
                numbers.append(self.submit(Request(prompt, wanted, **request)))
            events: dict[int, list[Event]] = {number: [] for number in numbers}
            left = len(numbers) * wanted.n
            while left:
                self.step()
                for event in self.poll():
                    if event.request not in events:
                        continue
                    if event.finish is Finish.FAILED:
                        raise EngineError(Status.INTERNAL, f"the engine failed: {self.failure}")
                    events[event.request].append(event)
                    left -= event.finish is not Finish.NONE
        finally:
            for number in numbers:
                self.cancel(number)
        return [collect(events[number], wanted.n) for number in numbers]

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Logits after each token of a text, (T, vocab), through the paged path in chunks of `step_tokens`.

        Raises:
            EngineError: TOO_LONG, or BUSY when requests hold the blocks that it takes.
        """
        vocab, size, count = self._runner.config.vocab_size, self.options.block_size, len(tokens)
        if not count or not all(0 <= token < vocab for token in tokens):
            raise _bad(f"the text has no tokens, or some that are not in the vocabulary of {vocab}")
        if count > self._capacity:
            raise EngineError(Status.TOO_LONG, f"{count} tokens don't fit a context of {self._capacity}")
        out = np.empty((count, vocab), np.float32)
        with self._turn:
            with self._lock:
                self._open()
                blocks = -(-count // size)
                if blocks > self._manager.available:
                    raise EngineError(Status.BUSY, f"{blocks} blocks are needed, and requests hold too many of them")
                table = [self._manager.allocate() for _ in range(blocks)]
            try:
                for start in range(0, count, self.options.step_tokens):
                    end = min(start + self.options.step_tokens, count)
                    piece = Rows(tokens[start:end], start, table, range(start, end))
                    hidden = self._runner.forward(self._runner.batch([piece]))
                    for row in range(0, end - start, HEAD_ROWS):
                        some = self._runner.logits(hidden[row : row + HEAD_ROWS])
                        out[start + row : start + row + len(some)] = some.cpu().numpy()
            finally:
                with self._lock:
                    for number in table:
                        self._manager.release(number)
        return out

    # ---- Memory and numbers

    def trim(self, level: Trim = Trim.CACHE) -> None:
        """Forget cached prefixes; at CRITICAL, let nobody but the request with the most work done keep its blocks."""
        with self._turn, self._lock:
            self._open()
            if level is Trim.CRITICAL:
                by_work = sorted(self._scheduler.running, key=lambda s: s.computed)
                for sequence in by_work[:-1]:
                    self._scheduler.preempt(sequence)
            self._manager.trim()

    def stats(self) -> Stats:
        """The counters since the engine was opened."""
        with self._lock:
            recent = sorted(self._recent)
            drafter = self._drafter
            return Stats(
                **asdict(self._scheduler.counters),
                draft_reached=tuple(drafter.reached),
                draft_kept=tuple(drafter.kept),
                drafted_tokens=drafter.drafted,
                draft_places=drafter.drafted,
                draft_runs=drafter.runs,
                draft_seconds=drafter.seconds,
                draft_length=self.options.draft_length if drafter.active else 0,
                waiting=len(self._scheduler.waiting),
                running=len(self._scheduler.running),
                blocks_total=self._manager.total,
                blocks_free=self._manager.free,
                blocks_cached=self._manager.cached,
                blocks_owned=self._manager.owned,
                batch_limit=self.options.max_batch,
                kv_tokens=self._manager.owned_tokens,
                failures=self._failures,
                requests_finished=self._finished,
                requests_cancelled=self._cancelled,
                step_seconds=self._step_seconds,
                forward_seconds=self._forward_seconds,
                sample_seconds=self._sample_seconds,
                step_p50_ms=1e3 * recent[len(recent) // 2] if recent else 0.0,
                step_p99_ms=1e3 * recent[len(recent) * 99 // 100] if recent else 0.0,
            )

    @property
    def description(self) -> dict[str, Any]:
        """What the engine settled on."""
        runner = self._runner
        return {
            **asdict(self.options),
            "context": self.context,
            "blocks": runner.blocks,
            "vocab_size": runner.config.vocab_size,
            "eos": sorted(self.eos),
            "memory": {"weights": runner.weight_bytes, "pools": runner.blocks * runner.block_bytes},
        }

    def check(self) -> None:
        """free + cached + owned == total, every reference count, and every book that must agree with another.

        Raises:
            AssertionError: with what is wrong.
        """
        with self._turn, self._lock:
            self._scheduler.check()
            for request in self._requests.values():
                assert not request.finished, f"request {request.number} has ended, and is still here"
            left = {a.sequence for r in self._requests.values() for a in r.answers if a.sequence and not a.finished}
            queued = {*self._scheduler.waiting, *self._scheduler.running}
            assert left == queued == set(self._answers), "requests and scheduler don't know the same sequences"

    def _open(self) -> None:
        if self._closed:
            raise _bad("the engine is closed")


@dataclass(frozen=True)
class _Said:
    """A token of an answer: its event (None: it only ends the answer), and whether the answer ends."""

    answer: Answer
    token: int
    event: Event | None
    finish: Finish


def _own_tokens(parts: Sequence[_Said]) -> list[int]:
    """The new tokens of a sequence: its answer's, not those of the answers that fork from it."""
    return [part.token for part in parts if part.answer is parts[0].answer and part.event is not None]


def _bad(what: str) -> EngineError:
    return EngineError(Status.INVALID_ARGUMENT, what)
