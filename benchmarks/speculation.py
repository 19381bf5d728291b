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

import re
import statistics
import time
from pathlib import Path

from common import Llama, command_line, fresh, greedy, plain_engine

from edgec.runtime import Engine, EngineOptions, Request
from edgec.runtime.bandwidth import read_bandwidth
from edgec.runtime.chat import ChatTemplate, Message
from edgec.runtime.settings import read_settings
from edgec.runtime.speculative import PROMPTS, measure

DRAFTERS = (
    ("llama-lookup", "--ignore-eos"),
    ("llama-speculative-simple", "--spec-type", "ngram-simple"),
    ("llama-speculative-simple", "--spec-type", "ngram-mod"),
    ("llama-speculative-simple", "--spec-type", "ngram-cache"),
)
ROWS = (1, 2, 3, 4, 5, 6, 8, 9)
BEFORE = 32  # tokens of a prompt that the measured pass comes after
MANY = 64  # rows that keep the arithmetic units busy


def pass_seconds(engine: Engine, rows: int, before: int, seed: int) -> float:
    """The last step of a prompt whose first `before` tokens are a step of their own: a pass over `rows`, all scored."""
    engine.submit(Request(fresh(before + rows, seed), greedy(1), score_prompt=True))
    seconds = 0.0
    while engine.stats().running or engine.stats().waiting:
        start = time.perf_counter()
        engine.step()
        seconds = time.perf_counter() - start
    engine.poll()
    return seconds


def passes(bundle: Path, threads: int, repeats: int) -> None:
    """What a row more costs, and what it would have to."""
    few = plain_engine(bundle, threads, step_tokens=BEFORE, max_batch=8)
    many = plain_engine(bundle, threads, step_tokens=MANY, max_batch=8)
    with few, many:
        per_token = int(few.description["bytes_per_token_read"])
        found: dict[int, list[float]] = {rows: [] for rows in (*ROWS, MANY)}
        rates = []
        for repeat in range(repeats * 3):
            rates.append(read_bandwidth(threads))
            for rows, times in found.items():
                engine, before = (many, 0) if rows == MANY else (few, BEFORE)
                times.append(pass_seconds(engine, rows, before, repeat))
    bandwidth, most = statistics.median(rates), statistics.median(found[MANY])
    print(f"{per_token / 1e6:.1f} MB a pass, {bandwidth / 1e9:.1f} GB/s; {MANY} rows {most * 1e3:.2f} ms")
    for rows in ROWS:
        own = statistics.median(found[rows])
        bound = max(per_token / bandwidth, rows * most / MANY)
        print(f"  {rows} rows  {own * 1e3:6.2f} ms  bound {bound * 1e3:6.2f} ms  {bound / own:5.0%}")


def llama_rate(llama: Llama, drafter: tuple[str, ...], text: str, tokens: int) -> float:
    name, *options = drafter
    said = "".join(llama.run(name, "-c", "1024", "-n", str(tokens), "--temp", "0", *options, "-p", text))
    found = re.search(r"decoded\s+(\d+) tokens in\s+([\d.]+) seconds", said)
    if found is None:
        raise SystemExit(f"{name} printed no rate")
    return int(found[1]) / float(found[2])


def main() -> None:
    parser = command_line(__doc__, repeats=3)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0, help="llama.cpp is asked at 0 only")
    given = parser.parse_args()
    llama = Llama.of(given) if given.temperature == 0 else None
    passes(given.bundle, given.threads, given.repeats)
    ratios, against = [], []
    with Engine(given.bundle, EngineOptions(threads=given.threads, prefix_cache=False)) as engine:
        template = ChatTemplate.of(engine.folder, read_settings(engine.folder))
        print(f"{engine.description['speculation']}, temperature {given.temperature:g}")
        for prompt in PROMPTS:
            name, templated, text = prompt
            if templated and template is not None:
                text = "".join(piece for piece, _ in template.render([Message("user", text)]))
            rates: dict[str, list[float]] = {}
            for _ in range(given.repeats):
                report = measure(
                    engine, temperature=given.temperature, tokens=given.tokens, repeats=1, prompts=[prompt]
                )
                [pair] = report.pairs
                rates.setdefault("plain", []).append(pair.plain)
                rates.setdefault("speculative", []).append(pair.speculative)
                for drafter in DRAFTERS if llama else ():
                    rate = llama_rate(llama, drafter, text, given.tokens)  # type: ignore[arg-type]
                    rates.setdefault(" ".join(drafter[:1] + drafter[2:]), []).append(rate)
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
