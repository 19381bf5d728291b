"""What benchmarks of the native engine share: engines that decode plainly, prompts, llama.cpp, the command line."""

from __future__ import annotations

import argparse
import os
import random
import subprocess
from pathlib import Path
from typing import Any

from edgec.runtime import Engine, EngineOptions, Sampling
from edgec.runtime.abi import Speculation


def plain_engine(bundle: Path, threads: int, **options: Any) -> Engine:
    """Without prefix cache, and without speculation unless `options` has it; the caller closes it."""
    options.setdefault("speculation", Speculation.OFF)
    return Engine(bundle, EngineOptions(threads=threads, prefix_cache=False, memory_budget=600_000_000, **options))


def fresh(length: int, seed: int) -> list[int]:
    """A prompt that no cache has seen."""
    generator = random.Random(seed)
    return [generator.randrange(300, 40000) for _ in range(length)]


def drain(engine: Engine) -> None:
    while engine.stats().running or engine.stats().waiting:
        engine.step()
    engine.poll()


def greedy(tokens: int) -> Sampling:
    return Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)


class Llama:
    """llama.cpp's own programs over a GGUF file."""

    def __init__(self, folder: Path, model: Path, threads: int) -> None:
        self.folder, self.model, self.threads = folder, model, threads

    @staticmethod
    def of(given: argparse.Namespace) -> Llama | None:
        return Llama(given.llama, given.gguf, given.threads) if given.llama and given.gguf else None

    def run(self, name: str, *arguments: str) -> tuple[str, str]:
        """What it prints on stdout and stderr. Answers may end inside a character."""
        command = [str(self.folder / name), "-m", str(self.model), "-t", str(self.threads), *arguments]
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=True)
        return done.stdout, done.stderr


def command_line(doc: str | None, *, repeats: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--llama", type=Path, help="folder with llama.cpp's programs")
    parser.add_argument("--gguf", type=Path, help="the same model as Q8_0")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeats", type=int, default=repeats)
    return parser
