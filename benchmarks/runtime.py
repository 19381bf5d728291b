"""The native engine against its bounds and against llama.cpp, in one run.

    python benchmarks/runtime.py out/smollm2-135m
    python benchmarks/runtime.py out/smollm2-135m --llama DIR --gguf MODEL-Q8_0.gguf

DIR holds llama.cpp's `llama-bench` and `llama-batched-bench`. Both engines read the same weights in INT8, with the same
number of threads, in turns, so that what else the machine does disturbs both alike; medians are compared. Printed:

* decode, batch 1: tokens a second, the share of (measured memory bandwidth ÷ bytes read for a token), times llama.cpp;
* decode, batch 8, and prefill of 128 tokens: times llama.cpp; prefill against the measured INT8 rate of one product;
* continuous against static batching on one trace with exponential lengths, and step occupancy;
* KV utilisation by block size, on the lengths of the recipe's own mix;
* scheduling as a share of a decode step; seconds from opening the bundle to the first token.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from common import Llama, command_line, drain, fresh, greedy, plain_engine

from edgec.runtime import Engine, Request
from edgec.runtime.abi import Batching
from edgec.runtime.bandwidth import read_bandwidth


def decode_rate(engine: Engine, batch: int, tokens: int, seed: int) -> float:
    """Answer tokens a second of `batch` answers together, their prompts already computed."""
    for i in range(batch):
        engine.submit(Request(fresh(8, seed * 100 + i), greedy(tokens + 1)))
    engine.step()  # the prompts
    before = engine.stats()
    start = time.perf_counter()
    while engine.stats().running:
        engine.step()
    seconds = time.perf_counter() - start
    engine.poll()
    return (engine.stats().answer_tokens - before.answer_tokens) / seconds


def prefill_rate(engine: Engine, tokens: int, seed: int) -> float:
    engine.submit(Request(fresh(tokens, seed), greedy(1)))
    start = time.perf_counter()
    drain(engine)
    return tokens / (time.perf_counter() - start)


def llama_single(llama: Llama, *, prompt: int = 0, answer: int = 0) -> float:
    out, _ = llama.run("llama-bench", "-p", str(prompt), "-n", str(answer), "-r", "1", "-o", "json")
    return float(json.loads(out)[0]["avg_ts"])


def llama_batched(llama: Llama, batch: int, tokens: int) -> float:
    sizes = ("-c", "2048", "-b", "512", "-npp", "8", "-ntg", str(tokens), "-npl", str(batch))
    out, _ = llama.run("llama-batched-bench", *sizes, "--output-format", "jsonl")
    for row in out.splitlines():
        if row.startswith("{"):
            return float(json.loads(row)["speed_tg"])
    raise SystemExit("llama-batched-bench printed no figures")


def alternate(repeats: int, *calls: Callable[[int], float]) -> list[list[float]]:
    found: list[list[float]] = [[] for _ in calls]
    for i in range(repeats):
        for call, values in zip(calls, found, strict=True):
            values.append(call(i))
    return found


def line(what: str, ours: float, unit: str, **against: float | None) -> None:
    rest = ", ".join(
        f"{v:.2f}× {k}" if k != "of bound" else f"{v:.0%} {k}" for k, v in against.items() if v is not None
    )
    print(f"{what:<34} {ours:9.1f} {unit:<6} {rest}")


def peers(bundle: Path, llama: Llama | None, threads: int, repeats: int) -> None:
    with plain_engine(bundle, threads, max_batch=16, context=1024) as engine:
        prefill_rate(engine, 64, 10**6)  # warm
        per_token = int(engine.description["bytes_per_token_read"])
        jobs: list[tuple[str, Callable[[int], float], Callable[[int], float] | None]] = [
            (
                "prefill of 128",
                lambda i: prefill_rate(engine, 128, i),
                llama and (lambda _: llama_single(llama, prompt=128)),
            ),
            (
                "decode, batch 1",
                lambda i: decode_rate(engine, 1, 64, i),
                llama and (lambda _: llama_single(llama, answer=64)),
            ),
        ]
        for batch in (4, 8, 16):
            jobs.append(
                (
                    f"decode, batch {batch}",
                    lambda i, b=batch: decode_rate(engine, b, 32, i),
                    llama and (lambda _, b=batch: llama_batched(llama, b, 32)),
                )
            )
        for what, ours, theirs in jobs:
            calls = [ours, *([theirs] if theirs else [])]
            if what == "decode, batch 1":
                calls.append(lambda _: read_bandwidth(threads))
            found = [statistics.median(values) for values in alternate(repeats, *calls)]
            bound = found[-1] / per_token if what == "decode, batch 1" else None
            line(
                what,
                found[0],
                "tok/s",
                **{"llama.cpp": found[0] / found[1] if theirs else None},
                **{"of bound": found[0] / bound if bound else None},
            )
            if bound:
                print(f"{'':<34} bound: {found[-1] / 1e9:.1f} GB/s ÷ {per_token / 1e6:.1f} MB = {bound:.0f} tok/s")
        stats = engine.stats()
        outside = stats.step_seconds - stats.forward_seconds - stats.sample_seconds
        print(f"{'scheduling and bookkeeping':<34} {outside / stats.step_seconds:9.2%} of the steps' time")


def batching(bundle: Path, threads: int) -> None:
    """One trace, exponential answer lengths, continuous and static."""
    generator = random.Random(0)
    trace = [(fresh(32, 5000 + i), max(1, min(448, int(generator.expovariate(1 / 128))))) for i in range(192)]
    rates = {}
    for kind in (Batching.CONTINUOUS, Batching.STATIC):
        with plain_engine(bundle, threads, max_batch=16, context=512, batching=kind) as engine:
            start = time.perf_counter()
            for prompt, length in trace:
                engine.submit(Request(prompt, greedy(length)))
            drain(engine)
            stats = engine.stats()
            rates[kind] = stats.answer_tokens / (time.perf_counter() - start)
            name = kind.name.lower()
            print(
                f"{name + ' batching, 192 requests':<34} {rates[kind]:9.1f} tok/s  occupancy "
                f"{stats.batch_used / stats.batch_slots:.1%}, KV utilisation "
                f"{stats.kv_token_steps / stats.kv_slot_steps:.1%}"
            )
    print(f"{'continuous ÷ static':<34} {rates[Batching.CONTINUOUS] / rates[Batching.STATIC]:9.2f} ×")
    for size in (4, 8, 16, 32, 64):
        with plain_engine(bundle, threads, max_batch=16, context=512, block_size=size) as engine:
            for prompt, length in trace[:32]:
                engine.submit(Request(prompt * 3, greedy(length)))
            drain(engine)
            stats = engine.stats()
            print(f"{f'KV utilisation, blocks of {size}':<34} {stats.kv_token_steps / stats.kv_slot_steps:9.1%}")


def cold_start(bundle: Path, repeats: int) -> None:
    """A process of its own each time, from the engine's opening to the first token."""
    code = (
        "import sys, time\n"
        "from edgec.runtime import Engine, Sampling\n"
        "import edgec.runtime.library as library; library.load()\n"
        "start = time.perf_counter()\n"
        "with Engine(sys.argv[1]) as engine:\n"
        "    for event in engine.generate('The moon is', Sampling(max_tokens=1, temperature=0.0)):\n"
        "        print(time.perf_counter() - start); break\n"
    )
    times = [
        float(
            subprocess.run([sys.executable, "-c", code, str(bundle)], capture_output=True, text=True, check=True).stdout
        )
        for _ in range(repeats)
    ]
    line("cold start to the first token", 1e3 * statistics.median(times), "ms")


def main() -> None:
    given = command_line(__doc__, repeats=5).parse_args()
    llama = Llama.of(given)
    peers(given.bundle, llama, given.threads, given.repeats)
    batching(given.bundle, given.threads)
    cold_start(given.bundle, given.repeats)


if __name__ == "__main__":
    main()
