"""The simulator: its arithmetic by hand, the goals of the scheduler, traces, sweeps, and the command."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from edgec.errors import SourceError, UsageError
from edgec.runtime.compile import NATIVE
from edgec.runtime.failures import EngineError
from edgec.runtime.scheduling import STRUCTS, SchedulerConfig
from edgec.runtime.simulate import Setting, parse_sweep, recommend, simulate, sweep
from edgec.runtime.workload import (
    Cost,
    Lengths,
    Request,
    TenantMix,
    cost_from_bench,
    random_requests,
    read_trace,
)
from tests.conftest import Edgec
from tests.scheduling_core import core

SECOND = Cost(fixed=1.0, per_row=0.0, per_sequence=0.0)  # every step takes a second
MANY = SchedulerConfig(max_waiting=100_000)


def exponential(count: int, prompt: int, answer: int, **options: object) -> list[Request]:
    lengths = Lengths.parse(f"exponential:{prompt}"), Lengths.parse(f"exponential:{answer}")
    return random_requests(count, 0, *lengths, seed=1, **options)  # type: ignore[arg-type]


# ---- Arithmetic ------------------------------------------------------------------------------------------


def test_three_requests_by_hand() -> None:
    config = SchedulerConfig(context=64, max_batch=2, step_tokens=8, block_size=4)
    requests = [Request(0.0, 10, 3), Request(0.5, 2, 2), Request(20.0, 1, 1)]
    run = simulate(config, requests, SECOND, library=core())
    # 0–1: 8 of 10. 1–2: the last 2, and the second's 2. 2–3: one token each: the second ends. 3–4: the first ends.
    assert run.steps == 5
    assert run.seconds == 21.0
    assert (run.answer_tokens, run.computed_tokens) == (6, 16)  # the last token of each isn't computed
    assert run.first_token.p50 == pytest.approx(1.5, rel=0.004)
    assert run.first_token.p99 == pytest.approx(2.0, rel=0.004)
    assert run.between_tokens.p99 == pytest.approx(1.0, rel=0.004)
    assert run.busy == pytest.approx(5 / 21)
    assert run.occupancy == 1.0


def test_a_table_of_costs_is_followed_in_straight_lines() -> None:
    config = SchedulerConfig(context=64, max_batch=1, step_tokens=64)
    table = Cost(0.0, 0.0, 0.0, ((1.0, 1.0), (3.0, 2.0), (5.0, 6.0)))
    for rows, seconds in ((1, 1.0), (2, 1.5), (3, 2.0), (4, 4.0), (7, 10.0)):
        assert simulate(config, [Request(0.0, rows, 1)], table, library=core()).seconds == pytest.approx(seconds)


def test_static_batching_by_hand() -> None:
    config = SchedulerConfig(context=8, max_batch=2, step_tokens=8, block_size=4, static_batching=True, max_waiting=9)
    requests = [Request(0.0, 1, 1), Request(0.0, 4, 4), Request(0.0, 1, 1)]
    run = simulate(config, requests, Cost(0.0, 1.0, 0.0), library=core())
    # Prompts of 1 and 4: 5 rows and 3 of padding; three decodes of 1 row and 1 of padding; then the third alone.
    assert run.seconds == 8 + 3 * 2 + 1
    assert run.occupancy == pytest.approx(6 / 9)
    assert run.padding == pytest.approx(6 / 15)
    # All of the context is set aside (2 · 8 slots), then 8.
    assert run.kv_utilisation < 0.5


def test_equal_input_gives_equal_output() -> None:
    requests = exponential(300, 60, 60, tenants=[TenantMix("a", 2), TenantMix("b")])
    assert requests == exponential(300, 60, 60, tenants=[TenantMix("a", 2), TenantMix("b")])
    one, two = (simulate(MANY, requests, Cost(), library=core()) for _ in range(2))
    assert one == two


def test_shared_prefixes_are_found() -> None:
    plain = simulate(MANY, exponential(200, 32, 32), Cost(), library=core())
    shared = simulate(MANY, exponential(200, 32, 32, shared_prefix=256), Cost(), library=core())
    assert plain.cached == 0.0
    assert shared.cached > 0.75
    assert shared.tokens_per_second > 0.9 * plain.tokens_per_second


def test_what_does_not_fit_is_counted_and_the_rest_runs() -> None:
    config = SchedulerConfig(context=64, max_batch=2, step_tokens=8)
    run = simulate(config, [Request(0.0, 5000, 1), Request(0.0, 4, 2)], SECOND, library=core())
    assert (run.refused, run.answer_tokens) == (1, 2)


def test_nonsense_is_refused() -> None:
    with pytest.raises(EngineError, match="request 1"):
        simulate(MANY, [Request(1.0, 1, 1), Request(0.0, 1, 1)], SECOND, library=core())
    with pytest.raises(EngineError, match="ascending"):
        simulate(MANY, [Request(0.0, 1, 1)], Cost(table=((2.0, 1.0), (1.0, 1.0))), library=core())
    with pytest.raises(EngineError, match="cost"):
        simulate(MANY, [Request(0.0, 1, 1)], Cost(fixed=float("nan")), library=core())


# ---- The goals of the issue ------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompt", "answer"), [(128, 128), (32, 256)])
def test_continuous_batching_is_two_and_a_half_times_static_batching(prompt: int, answer: int) -> None:
    requests = exponential(600, prompt, answer)
    continuous = simulate(MANY, requests, Cost(), library=core())
    static = simulate(replace(MANY, static_batching=True), requests, Cost(), library=core())
    assert continuous.tokens_per_second >= 2.5 * static.tokens_per_second
    assert continuous.occupancy > 0.9
    assert static.occupancy < 0.4
    assert continuous.padding == 0.0 < static.padding
    assert continuous.answer_tokens == static.answer_tokens


@pytest.mark.slow
def test_the_recommended_block_size_keeps_95_percent_of_the_pool_in_use() -> None:
    requests = exponential(300, 128, 128)
    found, by_batch, by_block = recommend(Setting(MANY), requests, Cost(), library=core())
    used = {r.block_size: r.kv_utilisation for r in by_block}
    assert found.block_size == 16
    assert used[16] > 0.95 >= used[32]
    assert list(used.values()) == sorted(used.values(), reverse=True)
    assert [r.tokens_per_second for r in by_batch] == sorted(r.tokens_per_second for r in by_batch)


@pytest.mark.slow
def test_the_recommended_batch_meets_the_objective() -> None:
    requests = exponential(300, 16, 128)
    found, by_batch, _ = recommend(Setting(replace(MANY, step_tokens=64)), requests, Cost(), slo=0.1, library=core())
    gaps = {r.max_batch: r.between_tokens.p99 for r in by_batch}
    assert gaps[found.max_batch] <= 0.1
    assert max(gaps.values()) > 0.1


def test_the_controller_keeps_steps_to_the_objective() -> None:
    requests = exponential(1000, 64, 64)
    free = simulate(replace(MANY, max_batch=32), requests, Cost(), library=core())
    kept = simulate(replace(MANY, max_batch=32, step_slo=0.03), requests, Cost(), library=core())
    assert free.step.p99 > 0.1
    assert kept.step.p99 <= 0.03 * 1.005
    # 7 ms + 1.5 ms a row leave 15 rows, four of them a prompt's.
    assert 8 <= kept.batch_limit <= 15


@pytest.mark.slow
def test_millions_of_tokens_are_simulated_in_one_go() -> None:
    run = simulate(replace(MANY, max_batch=64, step_tokens=256), exponential(4000, 128, 128), Cost(), library=core())
    assert run.computed_tokens > 1_000_000


# ---- Workloads -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spelling", "mean"),
    [("fixed:40", 40), ("uniform:20:60", 40), ("exponential:40", 40), ("lognormal:40:0.8", 40)],
)
def test_lengths_have_the_mean_they_were_asked_for(spelling: str, mean: float) -> None:
    drawn = [r.answer for r in random_requests(20_000, 0, Lengths.parse("fixed:1"), Lengths.parse(spelling), seed=2)]
    assert sum(drawn) / len(drawn) == pytest.approx(mean, rel=0.03)
    assert min(drawn) >= 1
    assert str(Lengths.parse(spelling)) == spelling


@pytest.mark.parametrize(
    "spelling", ["", "fixed", "fixed:0", "fixed:x", "uniform:5:1", "normal:3:1", "fixed:nan", "lognormal:9:99"]
)
def test_lengths_that_are_none_are_refused_with_the_spellings(spelling: str) -> None:
    with pytest.raises(UsageError) as caught:
        Lengths.parse(spelling)
    assert "lognormal:128:0.8" in caught.value.hint


def test_arrivals_come_at_the_rate() -> None:
    drawn = random_requests(20_000, 50.0, Lengths.parse("fixed:1"), Lengths.parse("fixed:1"), seed=2)
    assert drawn[-1].arrival == pytest.approx(400, rel=0.03)


def test_traces_in_both_formats_are_the_same(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        '{"arrival": 2.5, "prompt": 7, "answer": 3, "tenant": "x", "priority": -2}\n\n'
        '{"arrival": 0, "prompt": 4, "answer": 2}\n'
    )
    (tmp_path / "b.csv").write_text("arrival,prompt,answer,tenant,priority\n2.5,7,3,x,-2\n0,4,2,,\n")
    expected = [Request(0.0, 4, 2), Request(2.5, 7, 3, tenant="x", priority=-2)]
    assert read_trace(tmp_path / "a.jsonl") == read_trace(tmp_path / "b.csv") == expected


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ('{"arrival": 0, "prompt": 1}', "no `answer`"),
        ('{"arrival": 0, "prompt": 1, "answer": 1, "promt": 2}', "unknown field `promt`"),
        ('{"arrival": 0, "prompt": 0, "answer": 1}', "`prompt` is out of range"),
        ('{"arrival": -1, "prompt": 1, "answer": 1}', "`arrival` is out of range"),
        ('{"arrival": NaN, "prompt": 1, "answer": 1}', "`arrival` is out of range"),
        ('{"arrival": 0, "prompt": "many", "answer": 1}', "which is no int"),
        ('{"arrival": 0, "prompt": [1], "answer": 1}', "which is no int"),
        ("[1]", "not a JSON object"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, what: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"arrival": 0, "prompt": 1, "answer": 1}\n' + line + "\n")
    with pytest.raises(SourceError, match=what) as caught:
        read_trace(path)
    assert "t.jsonl:2:" in caught.value.message


def test_step_costs_come_from_a_benchmark(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text(
        json.dumps(
            {
                "prefill": [{"tokens": 128, "tokens_per_second": 400.0}],
                "decode": [{"batch": 1, "tokens_per_second": 100.0}, {"batch": 8, "tokens_per_second": 400.0}],
            }
        )
    )
    assert cost_from_bench(path).table == ((1.0, 0.01), (8.0, 0.02), (128.0, 0.32))
    path.write_text("{}")
    with pytest.raises(SourceError, match="no step times"):
        cost_from_bench(path)


def test_sweeps_try_every_combination() -> None:
    sweeps = [parse_sweep("block-size=4,16"), parse_sweep("max-batch=1,2")]
    setting = Setting(replace(MANY, context=256), kv_tokens=4096)
    runs = sweep(setting, sweeps, exponential(30, 20, 20), Cost(), library=core())
    assert [(r.block_size, r.max_batch, r.blocks) for r in runs] == [
        *((4, 1, 1024), (4, 2, 1024), (16, 1, 256), (16, 2, 256))
    ]
    for wrong in ("block-size", "block-size=", "batch=1", "max-batch=0", "max-batch=1,x"):
        with pytest.raises(UsageError):
            parse_sweep(wrong)


def test_structs_are_those_of_the_header(tmp_path: Path) -> None:
    import ctypes

    lines = "".join(f'printf("{name} %zu\\n", sizeof({name}));\n' for name in STRUCTS)
    offsets = "".join(
        f'printf("{name}.{field[0]} %zu\\n", offsetof({name}, {field[0]}));\n'
        for name, struct in STRUCTS.items()
        for field in struct._fields_
    )
    source = f'#include <stdio.h>\n#include "edgec_scheduling.h"\nint main(void) {{ {lines}{offsets} return 0; }}\n'
    (tmp_path / "sizes.c").write_text(source)
    program = tmp_path / "sizes"
    subprocess.run(["gcc", f"-I{NATIVE / 'include'}", str(tmp_path / "sizes.c"), "-o", str(program)], check=True)
    found = dict(line.split() for line in subprocess.check_output([program], text=True).splitlines())
    expected = {name: ctypes.sizeof(struct) for name, struct in STRUCTS.items()}
    for name, struct in STRUCTS.items():
        expected |= {f"{name}.{field[0]}": getattr(struct, field[0]).offset for field in struct._fields_}
    assert {name: int(size) for name, size in found.items()} == expected


# ---- The command -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_prints_one_document_and_writes_a_page(edgec: Edgec) -> None:
    done = edgec(
        *("simulate", "--requests", "120", "--tenant", "<b>:3", "--tenant", "two", "--recommend", "--json"),
        *("--html", "page.html", "--sweep", "max-batch=4,8"),
    )
    assert done.code == 0, done.stderr
    document = done.json
    assert [g["title"] for g in document["groups"]] == [
        *("as swept", "continuous against static batching", "by batch", "by block size")
    ]
    assert document["continuous_over_static"] > 2
    assert document["recommendation"]["block_size"] in (4, 8, 16)
    page = (edgec.folder / "page.html").read_text()
    assert page.count("<svg") == 9
    assert "&lt;b&gt;" in page and "<b>" not in page
    assert "http" not in page.replace("http://www.w3.org", "")


@pytest.mark.slow
def test_people_get_tables(edgec: Edgec) -> None:
    (edgec.folder / "t.csv").write_text("arrival,prompt,answer\n0,4,2\n1,7,3\n")
    done = edgec("simulate", "t.csv", "--no-compare")
    assert done.code == 0, done.stderr
    assert "tokens/s" in done.stdout and "occupancy" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        *(["none.jsonl"], ["--prompt", "many"], ["--sweep", "x=1"], ["--tenant", ":1"], ["--bench", "none.json"]),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_code_2(edgec: Edgec, arguments: list[str]) -> None:
    done = edgec("simulate", *arguments)
    assert done.code == 2
    assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) <= 2
