"""`edgec simulate`: the scheduler alone on a workload, to plan capacity and to choose batch and block size.

The loop over steps is C++ (native/src/simulator.cpp), millions of tokens in seconds; here workloads are handed over,
and what comes back is turned into rates, shares and a recommendation.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from edgec.errors import UsageError
from edgec.runtime.scheduling import SchedulerConfig, SimCost, SimOutcome, SimReport, SimRequest, run_trace
from edgec.runtime.workload import Cost, Request

BLOCK_SIZES = (4, 8, 16, 32, 64)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
UTILISATION = 0.95  # the KV utilisation that a block size should reach (issue: "KV utilisation above 95 %")
KNEE = 0.95  # the smallest batch with this share of the best rate is as good, and kinder to latency


@dataclass(frozen=True)
class Quantiles:
    """Seconds."""

    p50: float
    p99: float


@dataclass(frozen=True)
class TenantResult:
    """What one tenant got."""

    name: str
    weight: float
    requests: int
    answer_tokens: int
    first_token: Quantiles
    longest_gap: float


@dataclass(frozen=True)
class Simulated:
    """One run. Shares are of 1, times are seconds."""

    name: str
    batching: str
    block_size: int
    blocks: int
    max_batch: int
    step_tokens: int
    requests: int
    refused: int
    seconds: float
    steps: int
    answer_tokens: int
    computed_tokens: int
    tokens_per_second: float  # of answers
    first_token: Quantiles  # from arrival
    between_tokens: Quantiles
    longest_gap: float
    request: Quantiles  # from arrival to the answer's end
    step: Quantiles
    occupancy: float  # of the sequences that steps could have held
    kv_utilisation: float  # of the positions in owned blocks
    preemptions: int
    recomputed: float  # share of the computed tokens
    cached: float  # share of the prompt tokens
    padding: float  # share of all rows, of static batching
    busy: float  # share of the time
    fairness: float  # Jain's index
    batch_limit: int  # B* at the end
    longest_wait_steps: int
    peak_blocks: int
    tenants: tuple[TenantResult, ...]

    def to_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return asdict(self)


def simulate(
    config: SchedulerConfig,
    requests: Sequence[Request],
    cost: Cost,
    *,
    name: str = "",
    library: ctypes.CDLL | None = None,
) -> Simulated:
    """Run the requests (sorted by arrival) to their end."""
    tenants = {t: i for i, t in enumerate(dict.fromkeys(r.tenant for r in requests))}
    prefixes = {p: i for i, p in enumerate(dict.fromkeys(r.prefix for r in requests))}
    array = (SimRequest * len(requests))(
        *(
            SimRequest(
                *(r.arrival, r.prompt, r.answer, r.max_tokens, r.priority, tenants[r.tenant], r.weight),
                *(prefixes[r.prefix], r.prefix_tokens),
            )
            for r in requests
        )
    )
    xs, ys = [x for x, _ in cost.table], [y for _, y in cost.table]
    table = (ctypes.c_double * max(len(xs), 1))(*xs), (ctypes.c_double * max(len(xs), 1))(*ys)
    priced = SimCost(cost.fixed, cost.per_row, cost.per_sequence, *table, len(xs))
    config = replace(config, max_waiting=max(config.max_waiting, 1))
    report, outcomes = run_trace(config, priced, array, library)
    return _result(name, config, requests, report, outcomes)


def _result(
    name: str,
    config: SchedulerConfig,
    requests: Sequence[Request],
    report: SimReport,
    outcomes: ctypes.Array[SimOutcome],
) -> Simulated:
    stats = report.stats

    def share(part: float, whole: float, nothing: float = 0.0) -> float:
        return part / whole if whole else nothing

    rows = stats.computed_tokens + stats.padding_rows
    return Simulated(
        name=name,
        batching="static" if config.static_batching else "continuous",
        block_size=config.block_size,
        blocks=config.pool_blocks,
        max_batch=config.max_batch,
        step_tokens=config.step_tokens,
        requests=len(requests),
        refused=report.refused,
        seconds=report.seconds,
        steps=stats.steps,
        answer_tokens=stats.answer_tokens,
        computed_tokens=stats.computed_tokens,
        tokens_per_second=share(stats.answer_tokens, report.seconds),
        first_token=Quantiles(report.first_token_p50, report.first_token_p99),
        between_tokens=Quantiles(report.gap_p50, report.gap_p99),
        longest_gap=report.gap_max,
        request=Quantiles(report.request_p50, report.request_p99),
        step=Quantiles(report.step_p50, report.step_p99),
        occupancy=share(stats.batch_used, stats.batch_slots, 1.0),
        kv_utilisation=share(stats.kv_token_steps, stats.kv_slot_steps, 1.0),
        preemptions=stats.preemptions,
        recomputed=share(stats.recomputed_tokens, stats.computed_tokens),
        cached=share(stats.cached_tokens, stats.prompt_tokens),
        padding=share(stats.padding_rows, rows),
        busy=share(report.busy_seconds, report.seconds),
        fairness=stats.fairness,
        batch_limit=stats.batch_limit,
        longest_wait_steps=stats.max_wait_steps,
        peak_blocks=report.peak_blocks,
        tenants=_by_tenant(requests, outcomes),
    )


def _by_tenant(requests: Sequence[Request], outcomes: ctypes.Array[SimOutcome]) -> tuple[TenantResult, ...]:
    groups: dict[str, list[int]] = {}
    for i, request in enumerate(requests):
        groups.setdefault(request.tenant, []).append(i)
    made = []
    for tenant, members in groups.items():
        waits = sorted(outcomes[i].first_token - requests[i].arrival for i in members if outcomes[i].first_token >= 0)
        made.append(
            TenantResult(
                name=tenant,
                weight=requests[members[-1]].weight,
                requests=len(members),
                answer_tokens=sum(outcomes[i].answer for i in members),
                first_token=Quantiles(_rank(waits, 0.5), _rank(waits, 0.99)),
                longest_gap=max((outcomes[i].longest_gap for i in members), default=0.0),
            )
        )
    return tuple(made)


def _rank(ordered: Sequence[float], q: float) -> float:
    return ordered[max(0, -int(-q * len(ordered) // 1) - 1)] if ordered else 0.0


# What `--sweep` may change: its spelling, and the field.
SWEEPS: dict[str, str] = {
    "block-size": "block_size",
    "max-batch": "max_batch",
    "step-tokens": "step_tokens",
    "kv-tokens": "kv_tokens",
    "aging-steps": "aging_steps",
}


def parse_sweep(text: str) -> tuple[str, tuple[int, ...]]:
    """`block-size=4,8,16` → ("block_size", (4, 8, 16)); raises UsageError."""
    name, _, values = text.partition("=")
    try:
        numbers = tuple(int(v) for v in values.split(","))
    except ValueError:
        numbers = ()
    if name not in SWEEPS or not numbers or min(numbers) < 1:
        raise UsageError(
            f"not a sweep: {text!r}", hint=f"write NAME=VALUE,VALUE,… with one of {', '.join(SWEEPS)} and whole numbers"
        )
    return SWEEPS[name], numbers


@dataclass(frozen=True)
class Setting:
    """A scheduler's configuration whose pool is given in tokens, so that it stays one size whatever the block size."""

    config: SchedulerConfig
    kv_tokens: int = 0  # 0: enough for max_batch sequences of the whole context

    def resolve(self) -> SchedulerConfig:
        """With the pool in blocks, and a step that holds the batch."""
        config = self.config
        tokens = self.kv_tokens or config.max_batch * config.context
        blocks = max(1, tokens // config.block_size)
        return replace(config, blocks=blocks, step_tokens=max(config.step_tokens, config.max_batch))

    def change(self, changes: Mapping[str, int]) -> Setting:
        """With some fields changed."""
        rest = {k: v for k, v in changes.items() if k != "kv_tokens"}
        return Setting(replace(self.config, **rest), changes.get("kv_tokens", self.kv_tokens))  # type: ignore[arg-type]


def sweep(
    setting: Setting,
    sweeps: Sequence[tuple[str, tuple[int, ...]]],
    requests: Sequence[Request],
    cost: Cost,
    *,
    progress: Callable[[str], None] = lambda _: None,
    library: ctypes.CDLL | None = None,
) -> list[Simulated]:
    """Every combination of the swept values; the setting alone when nothing is swept."""
    made = []
    for values in itertools.product(*(numbers for _, numbers in sweeps)):
        changes = {field: value for (field, _), value in zip(sweeps, values, strict=True)}
        name = ", ".join(f"{field.replace('_', ' ')} {value}" for field, value in changes.items()) or "as configured"
        progress(name)
        made.append(simulate(setting.change(changes).resolve(), requests, cost, name=name, library=library))
    return made


@dataclass(frozen=True)
class Recommendation:
    """What to set, and why."""

    max_batch: int
    block_size: int
    reasons: tuple[str, ...]


def recommend(
    setting: Setting,
    requests: Sequence[Request],
    cost: Cost,
    *,
    slo: float = 0.0,
    progress: Callable[[str], None] = lambda _: None,
    library: ctypes.CDLL | None = None,
) -> tuple[Recommendation, list[Simulated], list[Simulated]]:
    """Choose B* and the block size on this workload; also the runs it was chosen from, by batch and by block size.

    B*: with an `slo` (seconds) the batch with the best rate of those whose P99 between tokens meets it; without, the
    smallest that reaches 95 % of the best rate. Block size: the largest whose KV utilisation is above 95 %, for fewer
    blocks make shorter tables; when none reaches that, the one with the best utilisation.
    """
    fixed = replace(setting.config, step_slo=0.0)  # the batch is what is tried here, not what a controller makes of it
    base = Setting(fixed, setting.kv_tokens or fixed.max_batch * fixed.context)
    by_batch = sweep(base, [("max_batch", BATCHES)], requests, cost, progress=progress, library=library)
    reasons = []
    best = max(by_batch, key=lambda r: r.tokens_per_second)
    meeting = [r for r in by_batch if r.between_tokens.p99 <= slo]
    if slo > 0 and meeting:
        chosen = max(meeting, key=lambda r: r.tokens_per_second)
        reasons.append(
            f"max batch {chosen.max_batch}: the best rate ({chosen.tokens_per_second:.4g} tokens/s) of those whose P99 "
            f"between tokens ({chosen.between_tokens.p99 * 1000:.3g} ms) meets {slo * 1000:g} ms"
        )
    elif slo > 0:
        chosen = min(by_batch, key=lambda r: r.between_tokens.p99)
        reasons.append(
            f"max batch {chosen.max_batch}: no batch meets {slo * 1000:g} ms between tokens; this one is nearest with "
            f"{chosen.between_tokens.p99 * 1000:.3g} ms. Fewer step tokens would shorten the steps"
        )
    else:
        chosen = next(r for r in by_batch if r.tokens_per_second >= KNEE * best.tokens_per_second)
        reasons.append(
            f"max batch {chosen.max_batch}: the smallest with {KNEE:.0%} of the best rate "
            f"({chosen.tokens_per_second:.4g} of {best.tokens_per_second:.4g} tokens/s)"
        )
    at = base.change({"max_batch": chosen.max_batch})
    by_block = sweep(at, [("block_size", BLOCK_SIZES)], requests, cost, progress=progress, library=library)
    reaching = [r for r in by_block if r.kv_utilisation > UTILISATION]
    block = max(reaching, key=lambda r: r.block_size) if reaching else max(by_block, key=lambda r: r.kv_utilisation)
    why = f"the largest above {UTILISATION:.0%}" if reaching else f"none is above {UTILISATION:.0%}; this is the best"
    reasons.append(f"block size {block.block_size}: KV utilisation {block.kv_utilisation:.1%}, {why}")
    return Recommendation(chosen.max_batch, block.block_size, tuple(reasons)), by_batch, by_block
