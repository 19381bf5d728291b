"""The four wastes, as far as a build decides them: memory, compute, idle, size.

At run time they mean KV fragmentation, rejected tokens, empty batch slots and idle weights. A build has its own of
each, and these are measured here, from the document alone: nothing is estimated, and what was not measured stays null.
"""

from __future__ import annotations

from edgec.report.document import BuildDocument, Waste, Wastes


def measure_wastes(document: BuildDocument) -> Wastes:
    """The shares that are left, each between 0 and 1."""
    return Wastes(memory=_memory(document), compute=_compute(document), idle=_idle(document), size=_size(document))


def _memory(document: BuildDocument) -> Waste:
    """Peak memory of each stage beyond the float weights that it works on."""
    of = "each stage's peak memory, beyond the source's float32 weights; the share is the hungriest stage's"
    if not document.source_bytes:
        return Waste(share=None, of=of)
    peaks = {s.stage: s.peak_memory for s in document.ledger if s.peak_memory}
    by = {name: max(0.0, 1.0 - document.source_bytes / peak) for name, peak in peaks.items()}
    hungriest = max(peaks, key=lambda name: peaks[name]) if peaks else None
    return Waste(share=by[hungriest] if hungriest else None, of=of, by=by)


def _compute(document: BuildDocument) -> Waste:
    """Operations that only move data: an artefact's transposes, reshapes and copies."""
    by = {
        name: target.counts["layout_ops"] / target.counts["ops"]
        for name, target in document.targets.items()
        if target.counts.get("ops") and "layout_ops" in target.counts
    }
    return Waste(share=max(by.values(), default=None), of="an artefact's operations that only move data", by=by)


def _idle(document: BuildDocument) -> Waste:
    """Wall time in which no stage ran: starting processes, hashing, the store."""
    of = "the build's wall time, in which no stage was running"
    if document.seconds <= 0.0 or all(s.cached for s in document.ledger):
        return Waste(share=None, of=of)  # nothing had to run, so nothing waited
    busy = sum(s.seconds for s in document.ledger if not s.cached)
    return Waste(share=min(1.0, max(0.0, 1.0 - busy / document.seconds)), of=of)


def _size(document: BuildDocument) -> Waste:
    """Bytes of each artefact that are not the final model's weights: graph, metadata, second copies, floats."""
    models = [s.bytes for s in document.ledger if s.kind in ("source", "import", "pass") and s.bytes]
    of = "an artefact's bytes that are not the final model's weights"
    if not models:
        return Waste(share=None, of=of)
    by = {name: max(0.0, 1.0 - models[-1] / target.bytes) for name, target in document.targets.items() if target.bytes}
    return Waste(share=max(by.values(), default=None), of=of, by=by)
