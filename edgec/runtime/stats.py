"""The engine's counters (`edgec_stats` of edgec.h), and the four wastes that are computed from them."""

from __future__ import annotations

from dataclasses import dataclass, fields

from edgec.runtime import abi


@dataclass(frozen=True)
class Stats:
    """Counters since the engine was opened; the difference of two has the counters of the time between."""

    waiting: int = 0
    running: int = 0
    blocks_total: int = 0
    blocks_free: int = 0
    blocks_cached: int = 0
    blocks_owned: int = 0
    batch_limit: int = 0
    kv_tokens: int = 0
    steps: int = 0
    retries: int = 0
    failures: int = 0
    preemptions: int = 0
    requests_finished: int = 0
    requests_cancelled: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    batch_slots: int = 0
    batch_used: int = 0
    step_seconds: float = 0.0
    forward_seconds: float = 0.0
    sample_seconds: float = 0.0
    step_p50_ms: float = 0.0
    step_p99_ms: float = 0.0
    kv_token_steps: int = 0
    kv_slot_steps: int = 0
    draft_reached: tuple[int, ...] = (0,) * abi.MOST_DRAFTS
    """Proposals at each place of a run that came to be verified, those before them being kept."""
    draft_kept: tuple[int, ...] = (0,) * abi.MOST_DRAFTS
    drafted_tokens: int = 0
    draft_places: int = 0
    """Lengths of the longest branches of proposals, one of each run."""
    draft_runs: int = 0
    draft_seconds: float = 0.0
    draft_length: int = 0

    @staticmethod
    def from_c(raw: abi.Stats) -> Stats:
        values = {f.name: getattr(raw, f.name) for f in fields(Stats)}
        return Stats(**values | {name: tuple(values[name]) for name in _BY_PLACE})

    def since(self, earlier: Stats) -> Stats:
        """The counters of the time after `earlier`; what is not a counter stays as it is now."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        for name in _COUNTERS:
            values[name] -= getattr(earlier, name)
        for name in _BY_PLACE:
            values[name] = tuple(a - b for a, b in zip(values[name], getattr(earlier, name), strict=True))
        return Stats(**values)

    @property
    def occupancy(self) -> float | None:
        """Sequences in a step over those that it could have held; None before the first step."""
        return self.batch_used / self.batch_slots if self.batch_slots else None

    @property
    def utilisation(self) -> float | None:
        """Tokens held over the slots of the blocks that were owned for them, averaged over steps."""
        return self.kv_token_steps / self.kv_slot_steps if self.kv_slot_steps else None

    @property
    def scheduling(self) -> float | None:
        """Share of the steps' time outside the model and the sampler: planning and bookkeeping."""
        if self.step_seconds <= 0:
            return None
        return max(0.0, 1 - (self.forward_seconds + self.sample_seconds) / self.step_seconds)

    @property
    def recomputed(self) -> float | None:
        """Share of the rows through the model that preemption made necessary."""
        return self.recomputed_tokens / self.computed_tokens if self.computed_tokens else None

    @property
    def acceptance(self) -> tuple[float | None, ...]:
        """α by place: the share of proposals that were kept, of those whose predecessors were."""
        return tuple(k / r if r else None for k, r in zip(self.draft_kept, self.draft_reached, strict=True))

    @property
    def tokens_per_run(self) -> float | None:
        """Tokens that a verified run gave on average, the one after the proposals included."""
        return 1 + sum(self.draft_kept) / self.draft_runs if self.draft_runs else None

    @property
    def wasted_drafts(self) -> float | None:
        """Share of the proposals that passes computed and verification threw away."""
        return 1 - sum(self.draft_kept) / self.drafted_tokens if self.drafted_tokens else None


_COUNTERS = (
    *("steps", "retries", "failures", "preemptions", "requests_finished", "requests_cancelled", "prompt_tokens"),
    *("cached_tokens", "answer_tokens", "computed_tokens", "recomputed_tokens", "batch_slots", "batch_used"),
    *("step_seconds", "forward_seconds", "sample_seconds", "kv_token_steps", "kv_slot_steps"),
    *("drafted_tokens", "draft_places", "draft_runs", "draft_seconds"),
)
_BY_PLACE = ("draft_reached", "draft_kept")
