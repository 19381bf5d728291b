"""Speculative decoding against plain decoding, against llama.cpp's speculation, and against the machine, in one run.

    python benchmarks/speculation.py out/smollm2-135m-draft
    python benchmarks/speculation.py out/smollm2-135m-draft --llama DIR --gguf MODEL-Q8_0.gguf

DIR holds llama.cpp's `llama-lookup` and `llama-speculative-simple`, built from its examples. Its drafters need no
second model: `llama-lookup`, and the n-gram types of the other; the one that is fastest for a prompt counts. Both
engines read the same weights in INT8, with the same number of threads and prompts, in turns; medians are compared.
Printed:

* the pass by its rows: seconds, against what the machine allows, the greater of bytes read ÷ measured bandwidth and
  operations ÷ the rate of a pass with many rows;
* by prompt: tokens a second plainly and with speculation, their ratio, and llama.cpp's best.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import statistics
import subprocess
import time
from pathlib import Path

from edgec.runtime import Engine, EngineOptions, Request, Sampling
from edgec.runtime.abi import Speculation
from edgec.runtime.bandwidth import read_bandwidth
from edgec.runtime.chat import Chat, ChatTemplate, Message
from edgec.runtime.settings import read_settings
from edgec.runtime.speculative import PROMPTS

DRAFTERS = (
    ("llama-lookup", "--ignore-eos"),
    ("llama-speculative-simple", "--spec-type", "ngram-simple"),
    ("llama-speculative-simple", "--spec-type", "ngram-mod"),
    ("llama-speculative-simple", "--spec-type", "ngram-cache"),
)
ROWS = (1, 2, 3, 4, 5, 6, 8, 9)
MANY = 64  # rows that keep the arithmetic units busy


def plain(bundle: Path, threads: int, **options: int) -> Engine:
    made = EngineOptions(
        threads=threads, speculation=Speculation.OFF, prefix_cache=False, memory_budget=600_000_000, **options
    )
    return Engine(bundle, made)


def pass_seconds(engine: Engine, rows: int) -> float:
    """A step that computes `rows` tokens of a prompt, one more pass over the weights."""
    generator = random.Random(rows)
    tokens = [generator.randrange(300, 40000) for _ in range(32 + rows)]
    engine.submit(Request(tokens, Sampling(max_tokens=1, temperature=0.0, ignore_eos=True), score_prompt=True))
    times = []
    while engine.stats().running or engine.stats().waiting:
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
    engine.poll()
    return times[-1]


def passes(bundle: Path, threads: int, repeats: int) -> None:
    """What a row more costs, and what it would have to."""
    engines = {rows: plain(bundle, threads, step_tokens=32 if rows < MANY else MANY, max_batch=8) for rows in (1, MANY)}
    per_token = int(engines[1].description["bytes_per_token_read"])
    found: dict[int, list[float]] = {rows: [] for rows in (*ROWS, MANY)}
    rates = []
    for _ in range(repeats * 3):
        rates.append(read_bandwidth(threads))
        for rows, times in found.items():
            if rows == MANY:  # 32 + 64 tokens in steps of 64: the first is whole
                times.append(whole_pass(engines[MANY]))
            else:
                times.append(pass_seconds(engines[1], rows))
    bandwidth, many = statistics.median(rates), statistics.median(found[MANY])
    print(f"{per_token / 1e6:.1f} MB a pass, {bandwidth / 1e9:.1f} GB/s; {MANY} rows {many * 1e3:.2f} ms")
    for rows in ROWS:
        own = statistics.median(found[rows])
        bound = max(per_token / bandwidth, rows * many / MANY)
        print(f"  {rows} rows  {own * 1e3:6.2f} ms  bound {bound * 1e3:6.2f} ms  {bound / own:5.0%}")
    for engine in engines.values():
        engine.close()


def whole_pass(engine: Engine) -> float:
    generator = random.Random(0)
    tokens = [generator.randrange(300, 40000) for _ in range(2 * MANY)]
    engine.submit(Request(tokens, Sampling(max_tokens=1, temperature=0.0, ignore_eos=True), score_prompt=True))
    start = time.perf_counter()
    engine.step()
    seconds = time.perf_counter() - start
    while engine.stats().running or engine.stats().waiting:
        engine.step()
    engine.poll()
    return seconds


def decode_rate(engine: Engine, prompt: list[int], sampling: Sampling) -> float:
    engine.submit(Request(prompt, sampling))
    engine.step()
    before, start = engine.stats().answer_tokens, time.perf_counter()
    while engine.stats().running:
        engine.step()
    seconds = time.perf_counter() - start
    engine.poll()
    return (engine.stats().answer_tokens - before) / seconds


def llama_rate(folder: Path, model: Path, threads: int, drafter: tuple[str, ...], text: str, tokens: int) -> float:
    name, *options = drafter
    sizes = ("-t", str(threads), "-c", "1024", "-n", str(tokens), "--temp", "0")
    command = [str(folder / name), "-m", str(model), *sizes, *options, "-p", text]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=True)
    found = re.search(r"decoded\s+(\d+) tokens in\s+([\d.]+) seconds", done.stdout + done.stderr)
    if found is None:
        raise SystemExit(f"{name} printed no rate")
    return int(found[1]) / float(found[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--llama", type=Path, help="folder with llama.cpp's examples")
    parser.add_argument("--gguf", type=Path, help="the same model as Q8_0")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0, help="llama.cpp is asked at 0 only")
    given = parser.parse_args()
    passes(given.bundle, given.threads, given.repeats)
    ratios, against = [], []
    with Engine(given.bundle, EngineOptions(threads=given.threads, prefix_cache=False)) as engine:
        chat, template = Chat.of(engine), ChatTemplate.of(engine.folder, read_settings(engine.folder))
        print(f"{engine.description['speculation']}, temperature {given.temperature:g}")
        for name, templated, question in PROMPTS:
            text, prompt = question, engine.encode_prompt(question)
            if templated and template is not None:
                message = [Message("user", question)]
                text, prompt = "".join(piece for piece, _ in template.render(message)), chat.tokens(message)
            rates: dict[str, list[float]] = {"plain": [], "speculative": []}
            for repeat in range(given.repeats):
                for kind in ("plain", "speculative"):
                    sampling = Sampling(
                        max_tokens=given.tokens,
                        temperature=given.temperature,
                        seed=repeat,
                        ignore_eos=True,
                        speculate=kind == "speculative",
                    )
                    rates[kind].append(decode_rate(engine, prompt, sampling))
                if given.llama and given.gguf and given.temperature == 0:
                    for drafter in DRAFTERS:
                        key = " ".join(drafter[:1] + drafter[2:])
                        rate = llama_rate(given.llama, given.gguf, given.threads, drafter, text, given.tokens)
                        rates.setdefault(key, []).append(rate)
            medians = {kind: statistics.median(values) for kind, values in rates.items()}
            theirs = {kind: rate for kind, rate in medians.items() if kind.startswith("llama")}
            ratios.append(medians["speculative"] / medians["plain"])
            line = f"{name:<12} {medians['plain']:7.1f} → {medians['speculative']:7.1f} tok/s  {ratios[-1]:5.2f}×"
            if theirs:
                best = max(theirs, key=lambda kind: theirs[kind])
                against.append(medians["speculative"] / theirs[best])
                line += f"   llama.cpp {theirs[best]:7.1f} ({best}): {against[-1]:.2f}×"
            print(line, flush=True)
    print(f"median {statistics.median(ratios):.2f}×, from {min(ratios):.2f} to {max(ratios):.2f}")
    if against:
        print(f"against llama.cpp: median {statistics.median(against):.2f}×, least {min(against):.2f}×")


if __name__ == "__main__":
    main()
