"""All checks, for every engine that is asked for: what `edgec validate` and a build's stage `validate` run.

An engine is held against the reference with the same weights, within limits, and against the float model, to report the
distance. References are made when they are needed and one at a time where they are large.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from edgec.errors import EdgecError, GateFailed, ParityError, Reason
from edgec.report.parts import ErrorRecord
from edgec.report.validation import FindingRecord, ValidatedTarget, Validation
from edgec.report.validation_views import finite
from edgec.validation.check_greedy import check_greedy, explained
from edgec.validation.check_paths import check_paths
from edgec.validation.check_sampling import SamplingEvidence, check_sampling
from edgec.validation.check_text import compare_text, judge_text
from edgec.validation.check_weights import Difference, check_weights
from edgec.validation.diagnosis import diagnose
from edgec.validation.findings import Finding, unproven
from edgec.validation.material import Material, cut, positions_needed
from edgec.validation.native_subject import NativeSubject
from edgec.validation.options import ValidateOptions
from edgec.validation.subjects import Reference, Subject

if TYPE_CHECKING:
    from edgec.reference.load import Loaded

Note = Callable[[str], None]


class Models(Protocol):
    """Where the references' models come from."""

    def same(self) -> Loaded:
        """The weights that the bundle should have: INT8 where its recipe quantises."""

    def float(self) -> Loaded:
        """The float weights that those were made of."""


class References:
    """The references of a validation, made when they are asked for."""

    def __init__(
        self,
        models: Models,
        options: ValidateOptions,
        *,
        device: str = "cpu",
        server: Reference | None = None,
        note: Note = lambda _: None,
    ) -> None:
        """
        Args:
            models: for references in this process, and for the diagnosis.
            device: where those compute.
            server: instead of those in this process.
            note: hears what could not be had.
        """
        self.models, self.options, self.device, self.server, self.note = models, options, device, server, note
        self._loaded: dict[str, Loaded] = {}
        self._open: dict[tuple[str, bool], Reference] = {}

    def gating(self, target: str) -> Reference:
        """The one with limits. A native engine's rounds activations, keys and values as the engine does."""
        return self.server or self._engine("same", target == "native")

    def floating(self) -> Reference | None:
        """The float model; None when the one with limits is float itself, or nobody asked.

        Raises:
            EdgecError: it can't be had.
        """
        if self.server is not None or not self.options.float_reference or not self.same().quantised:
            return None
        return self._engine("float", False)

    def same(self) -> Loaded:
        """The model with the weights that the bundle should have.

        Raises:
            EdgecError: it can't be had.
        """
        return self._load("same")

    def _load(self, weights: str) -> Loaded:
        if weights not in self._loaded:
            self._loaded[weights] = self.models.same() if weights == "same" else self.models.float()
        return self._loaded[weights]

    def _engine(self, weights: str, rounded: bool) -> Reference:
        from edgec.validation.reference_subject import EngineReference

        key = (weights, rounded)
        if key not in self._open:
            loaded = self._load(weights)
            name = "int8" if weights == "same" and loaded.quantised else "float"
            context = min(positions_needed(self.options), loaded.context)
            self._open[key] = EngineReference(loaded, name, rounded=rounded, device=self.device, context=context)
        return self._open[key]

    def labels(self) -> dict[str, str]:
        """Of those that were made."""
        made = [*self._open.values(), *([self.server] if self.server else [])]
        return {f"{r.name}, as native rounds" if getattr(r, "rounded", False) else r.name: r.label for r in made}

    def close(self) -> None:
        """Give everything back."""
        for reference in (*self._open.values(), *([self.server] if self.server else [])):
            reference.close()
        self._open.clear()
        self._loaded.clear()


def validate(
    openers: Mapping[str, Callable[[], Subject]],
    references: References,
    tokens: Sequence[int],
    options: ValidateOptions,
    *,
    text: str,
    progress: Note = lambda _: None,
) -> Validation:
    """Run every check on every engine.

    Args:
        openers: by target, what opens its engine.
        tokens: of the text.
        text: where it is from, for people.
        progress: hears what is being done.
    """
    start = time.monotonic()
    document = Validation(text=text)
    for target, opener in openers.items():
        subject = opener()
        try:
            document.targets[target] = _one(subject, references, tokens, options, text, progress)
        finally:
            subject.close()
    document.references = references.labels()
    document.seconds = time.monotonic() - start
    conclude(document)
    return document


def _one(
    subject: Subject, references: References, tokens: Sequence[int], options: ValidateOptions, text: str, progress: Note
) -> ValidatedTarget:
    start = time.monotonic()
    run = _Run(subject, references, options, cut(tokens, options, subject.context, text), progress)
    findings = run.all()
    record = ValidatedTarget(label=subject.label, tokens=run.material.scored)
    if isinstance(subject, NativeSubject):
        record.library = subject.library
    record.findings = [
        FindingRecord(
            check=f.check,
            value=finite(f.value),
            limit=f.limit,
            least=f.least,
            verdict=f.verdict,
            reference=f.reference,
            # What is only reported of the float model is nobody's condition.
            required=f.check in options.require and (f.reference != "float" or f.limit is not None or run.alone),
            message=f.message,
        )
        for f in findings
    ]
    record.diagnosis = list(run.diagnosis(findings))
    record.seconds = time.monotonic() - start
    return record


class _Run:
    """The checks of one engine, and what the diagnosis will want to know."""

    def __init__(
        self, subject: Subject, references: References, options: ValidateOptions, material: Material, progress: Note
    ) -> None:
        self.subject = subject
        self.references = references
        self.options = options
        self.material = material
        self.progress = progress
        self.limits = options.limits_of(subject.target)
        self.weights: list[Difference] = []
        self.sampling: SamplingEvidence | None = None

    @cached_property
    def gating(self) -> Reference:
        return self.references.gating(self.subject.target)

    @property
    def alone(self) -> bool:
        """The reference with limits is the float model itself."""
        return self.gating.name == "float"

    def all(self) -> list[Finding]:
        """Every check's findings."""
        found = self._weights() + self._text() + self._greedy()
        self.progress(f"{self.subject.target}: sampled answers")
        prompts, length = self.material.prompts, self.options.answer
        sampled, self.sampling = check_sampling(self.subject, self.gating, prompts, length, self.options.samples)
        found += sampled
        if isinstance(self.subject, NativeSubject):
            self.progress(f"{self.subject.target}: ways through the scheduler")
            found += check_paths(self.subject, prompts, length)
        return found

    def _weights(self) -> list[Finding]:
        if not isinstance(self.subject, NativeSubject):
            return []
        try:
            loaded = self.references.same()
        except EdgecError as error:
            return [unproven("weights", error.message)]
        own = (self.subject.folder / "model.safetensors").resolve()
        if Path(loaded.origin.partition(": ")[0]).resolve() == own:
            return [unproven("weights", "the reference's weights were read from the bundle itself", self.gating.name)]
        name = "int8" if loaded.quantised else "float"
        finding, self.weights = check_weights(self.subject.folder, loaded.model, name)
        return [finding]

    def _text(self) -> list[Finding]:
        references, missing = [self.gating], []
        try:
            if (floating := self.references.floating()) is not None:
                references.append(floating)
        except EdgecError as error:
            missing = [unproven("kl", error.message, "float")]
        total = self.material.scored
        self.progress(
            f"{self.subject.target}: {total:,} tokens of text against {' and '.join(r.name for r in references)}"
        )
        compared = compare_text(self.subject, references, self.material.windows)
        self.text = compared[self.gating.name]
        found = judge_text(self.text, self.gating.name, self.limits)
        for reference in references[1:]:
            found += judge_text(compared[reference.name], reference.name, None)
        return found + missing

    def _greedy(self) -> list[Finding]:
        self.progress(f"{self.subject.target}: greedy answers")
        # A lower bound of the KL explains less than there may be to explain.
        bound = explained(None if self.text.partial else self.text.greatest, self.limits.kl_p99)
        finding, _ = check_greedy(self.subject, self.gating, self.material.prompts, self.options.answer, bound)
        return [finding]

    def diagnosis(self, findings: Sequence[Finding]) -> tuple[str, ...]:
        if not any(f.verdict == "fail" for f in findings):
            return ()
        self.progress(f"{self.subject.target}: looking for the cause")
        try:
            model = self.references.same()
        except EdgecError as error:
            model = None
            self.references.note(f"the diagnosis has no model to try hypotheses on: {error.message}")
        return diagnose(
            self.subject,
            self.limits,
            findings,
            text=self.text,
            weights=self.weights,
            sampling=self.sampling,
            window=self.material.windows[0],
            model=model,
            reference=self.gating,
            rounded=self.subject.target == "native",
        ).lines


def conclude(document: Validation) -> EdgecError | None:
    """Set the document's status by its findings; gives the error, if any.

    A finding beyond its limit is a failure of parity, exit code 6; only required checks that are unproven, 3.
    """
    broken = [(name, f) for name, target in document.targets.items() for f in target.broken]
    if not broken:
        return None
    failed = [(name, f) for name, f in broken if f.verdict == "fail"]
    name, first = (failed or broken)[0]
    more = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
    message = f"{name}: {first.sentence()}{more}"
    error: EdgecError
    if failed:
        points = document.targets[name].diagnosis
        error = ParityError(message, hint="; ".join(points) or "the table has every number")
    else:
        error = GateFailed(message, hint="leave it out of --require, or make it possible", reason=Reason.UNPROVEN)
    document.status, document.exit_code = "failed", int(error.exit_code)
    document.error = ErrorRecord.model_validate(error.to_dict())
    return error
