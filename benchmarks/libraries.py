"""Two builds of the native core against each other, within a half percent in a minute or two.

    python benchmarks/libraries.py out/smollm2-135m-draft OLD/libedgec.so NEW/libedgec.so --rows 1 4 6

Host and neighbours change from second to second, and where a process's memory lies can matter by two percent. So both
libraries are loaded into one process, an engine of each steps in turns, a dozen steps at a time, and engines are made
anew again and again, in both orders. Printed by rows of a pass: medians of both, and the median over the repeats of
new ÷ old, with the standard error of their mean. A library against a copy of itself shows what noise there is.

A pass of several rows verifies proposals of n-grams, on a text that says the same token over and over.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from common import greedy, plain_engine

from edgec.runtime import Engine, Request
from edgec.runtime.abi import Speculation

TOKEN = 1000  # of the text
STEPS, CHUNKS = 14, 4  # in turns
COLD = 3  # steps of a chunk that don't count: the other engine's caches


def engine_of(library: Path, bundle: Path, rows: int, threads: int) -> Engine:
    os.environ["EDGEC_LIBRARY"] = str(library)
    drafts = {"speculation": Speculation.NGRAM, "draft_length": rows - 1, "draft_width": 1} if rows > 1 else {}
    return plain_engine(bundle, threads, step_tokens=512, **drafts)


def chunk(engine: Engine) -> float:
    """Median seconds of a step."""
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
    engine.poll()
    return statistics.median(times[COLD:])


def repeat(given: argparse.Namespace, rows: int, turned: bool) -> list[tuple[float, float]]:
    """Seconds of a step by the old library and by the new one, chunk by chunk."""
    order = (1, 0) if turned else (0, 1)
    found = []
    with ExitStack() as stack:
        engines: dict[int, Engine] = {}
        for i in order:
            engine = engine_of((given.old, given.new)[i], given.bundle, rows, given.threads)
            engines[i] = stack.enter_context(engine)
            sampling = replace(greedy((STEPS * CHUNKS + 4) * rows), logit_bias={TOKEN: 100.0})
            engine.submit(Request([TOKEN] * given.tokens, sampling))
            for _ in range(2):
                engine.step()
        for number in range(CHUNKS):
            pair = {i: chunk(engines[i]) for i in (order if number % 2 == 0 else order[::-1])}
            found.append((pair[0], pair[1]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("old", type=Path, help="a library")
    parser.add_argument("new", type=Path, help="another")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 6], help="of a pass, 1 to 9")
    parser.add_argument("--tokens", type=int, default=400, help="of text before the first pass")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    if not all(1 <= rows <= 9 for rows in given.rows) or given.repeats < 2 or given.tokens < 1:
        parser.error("rows go from 1 to 9, repeats from 2, tokens from 1")
    for rows in given.rows:
        chunks, ratios = [], []
        for number in range(given.repeats):
            own = repeat(given, rows, turned=number % 2 == 1)
            chunks += own
            ratios.append(statistics.median(new / old for old, new in own))
        old, new = (statistics.median(side) * 1e3 for side in zip(*chunks, strict=True))
        error = statistics.stdev(ratios) / len(ratios) ** 0.5
        print(
            f"{rows} rows  {old:7.3f} → {new:7.3f} ms  new ÷ old {statistics.median(ratios):.4f} ± {error:.4f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
