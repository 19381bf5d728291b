"""The scheduler's part of the core for tests, compiled with its self-checks on, and an engine without a model.

With assertions the core verifies pool, tables and queue after every step and every call by itself, so a test that only
drives it checks every invariant.
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from edgec.runtime.abi import StepOutcome
from edgec.runtime.compile import NATIVE, host
from edgec.runtime.failures import EngineError
from edgec.runtime.scheduling import Admission, Planned, Pool, Scheduler, SchedulerConfig
from edgec.store import default_root

# And whatever these include.
SOURCES = (
    *(
        "batch_controller",
        "block_pool",
        "c_api_scheduling",
        "fair_queue",
        "planner",
        "scheduler",
        "simulator",
        "status",
    ),
)


@cache
def core() -> ctypes.CDLL:
    """Compiled once per state of the sources."""
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update((NATIVE / "src" / f"{name}.cpp").read_bytes())
    for path in sorted((NATIVE / "src").glob("*.h")) + sorted((NATIVE / "include").glob("*.h")):
        digest.update(path.read_bytes())
    place = default_root() / "runtime" / f"scheduling-{digest.hexdigest()[:24]}" / host().library
    if not place.is_file():
        compiler = shutil.which("g++") or shutil.which("clang++")
        if compiler is None:
            pytest.skip("no C++ compiler")
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent) as folder:
            made = Path(folder) / place.name
            flags = ["-std=c++17", "-O1", "-fPIC", "-ffp-contract=off", "-fvisibility=hidden", "-shared"]
            paths = [str(NATIVE / "src" / f"{name}.cpp") for name in SOURCES]
            includes = [f"-I{NATIVE / 'include'}", f"-I{NATIVE / 'src'}"]
            subprocess.run([compiler, *flags, *includes, *paths, "-o", str(made)], check=True)
            made.replace(place)
    return ctypes.CDLL(str(place))


def make_pool(blocks: int, block_size: int, first_block: int = 0, **options: Any) -> Pool:
    return Pool(blocks, block_size, first_block, library=core(), **options)


def make_scheduler(**options: Any) -> Scheduler:
    return Scheduler(SchedulerConfig(**options), library=core())


def next_token(tokens: Sequence[int]) -> int:
    """What follows `tokens`: a function of all of them, so an answer doesn't depend on how it was computed."""
    return hash(tuple(tokens)) % 97


class FakeEngine:
    """Runs a scheduler's steps. Its "keys and values" are digests of all tokens up to a position, kept in blocks as
    real ones would be: a read of a wrong, stale or overwritten slot fails the test.
    """

    def __init__(self, **options: Any) -> None:
        self.scheduler = make_scheduler(**options)
        self.config = self.scheduler.config
        self.slots: dict[tuple[int, int], int] = {}
        self.wanted: dict[int, int] = {}  # answer tokens by id
        self.prompts: dict[int, list[int]] = {}
        self.answers: dict[int, list[int]] = {}  # of those that finished
        self.alive: list[int] = []
        self.seconds = 0.001
        self.trace: list[Planned] = []  # committed steps

    def add(self, id: int, prompt: Iterable[int], answer: int = 4, **options: Any) -> Admission:
        prompt = list(prompt)
        admission = self.scheduler.add(id, prompt, **options)
        if admission == Admission.ACCEPTED:
            self.prompts[id], self.wanted[id] = prompt, answer
            self.alive.append(id)
        return admission

    def fork(self, parent: int, child: int) -> None:
        self.scheduler.fork(parent, child)
        self.prompts[child], self.wanted[child] = self.prompts[parent], self.wanted[parent]
        self.alive.append(child)

    def cancel(self, id: int) -> None:
        self.scheduler.cancel(id)
        self.alive.remove(id)

    def reserve(self) -> Planned | None:
        """The next step's plan, reserved; None when there is nothing to do."""
        for _ in range(3):  # out of date, then victims: a plan made after that can be reserved
            plan = self.scheduler.plan()
            outcome, copies = self.scheduler.reserve()
            if outcome == StepOutcome.RETRY:
                continue
            if outcome != StepOutcome.COMMITTED:
                assert outcome == StepOutcome.IDLE, "with work there is always a step"
                return None
            self.forward(plan, copies)
            return plan
        raise AssertionError("the scheduler retries for ever")

    def forward(self, plan: Planned, copies: list[tuple[int, int]]) -> None:
        size = self.config.block_size
        for source, to in copies:
            for offset in range(size):
                self.slots[to, offset] = self.slots.get((source, offset), 0)
        for chunk in plan.chunks:
            tokens, table = self.scheduler.contents(chunk.sequence)
            digest = 0
            for position in range(chunk.start + chunk.count):
                digest = hash((digest, tokens[position]))
                slot = (table[position // size], position % size)
                if position >= chunk.start:
                    self.slots[slot] = digest
                else:
                    assert self.slots.get(slot) == digest, f"sequence {chunk.sequence} reads a wrong slot at {position}"

    def commit(self, plan: Planned) -> None:
        results: dict[int, tuple[list[int], bool]] = {}
        for chunk in plan.chunks:
            if not chunk.samples or chunk.sequence not in self.alive:
                continue
            tokens, _ = self.scheduler.contents(chunk.sequence)
            info = self.scheduler.sequence(chunk.sequence)
            if not info.running:
                continue  # preempted meanwhile: its result is not wanted
            tokens.append(next_token(tokens))
            done = len(tokens) - len(self.prompts[chunk.sequence]) >= self.wanted[chunk.sequence] or info.room == 1
            results[chunk.sequence] = (tokens[-1:], done)
            if done:
                self.answers[chunk.sequence] = tokens
                self.alive.remove(chunk.sequence)
        self.scheduler.commit(results, self.seconds)
        self.trace.append(plan)

    def step(self) -> Planned | None:
        plan = self.reserve()
        if plan is not None:
            self.commit(plan)
        return plan

    def run(self, most: int = 100_000) -> int:
        """Step until nothing is left; how many steps that took."""
        for steps in range(most):
            if self.step() is None:
                return steps
        raise AssertionError(f"still at work after {most} steps")

    def check_answers(self) -> None:
        """Every finished sequence has the tokens that it would have had alone."""
        for id, tokens in self.answers.items():
            alone = list(self.prompts[id])
            while len(alone) < len(tokens):
                alone.append(next_token(alone))
            assert tokens == alone, f"sequence {id} was disturbed"

    def whole(self) -> bool:
        """Whether every block is back."""
        counts = self.scheduler.pool
        return counts.owned == 0 and counts.free + counts.cached == counts.total


__all__ = ["EngineError", "FakeEngine", "core", "make_pool", "make_scheduler", "next_token"]
