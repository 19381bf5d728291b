"""The Python API over the C ABI, with a core that repeats its prompt (fake_core.c)."""

from __future__ import annotations

import ctypes
import gc
import threading
from pathlib import Path

import numpy as np
import pytest

from edgec.errors import EdgecError, ExitCode, Reason, UsageError
from edgec.runtime import Engine, EngineOptions, Request, Sampling
from edgec.runtime.abi import EventKind, Finish, LogLevel, Status, StepOutcome, Trim
from edgec.runtime.driver import Driver
from edgec.runtime.events import Event
from edgec.runtime.failures import EngineError
from edgec.runtime.locate import bundle_name, native_folder
from edgec.runtime.stats import Stats


def test_an_answer_is_streamed_in_pieces(parrot: Engine) -> None:
    assert list(parrot.stream("hello")) == ["h", "e", "l", "l", "o"]


def test_a_character_of_several_tokens_is_one_piece(parrot: Engine) -> None:
    assert list(parrot.stream("a한🙂b")) == ["a", "한", "🙂", "b"]


def test_a_nul_in_the_text_is_text(parrot: Engine) -> None:
    assert list(parrot.stream("a\0b")) == ["a", "\0", "b"]


def test_events_carry_what_the_core_said(parrot: Engine) -> None:
    events = list(parrot.generate("ab", Sampling(logprobs=2)))
    assert [e.kind for e in events] == [EventKind.TOKEN, EventKind.TOKEN, EventKind.FINISH]
    assert [e.token for e in events[:2]] == [97, 98]
    assert events[0].logprob == -0.5 and events[0].top == ((97, -0.5), (98, -1.5))
    assert events[-1].finish is Finish.STOP
    assert (events[-1].prompt_tokens, events[-1].answer_tokens) == (2, 2)


def test_events_outlive_the_next_poll(parrot: Engine) -> None:
    """The core's pointers end with the next poll, after which the fake writes '#' over the text."""
    number = parrot.submit(Request(parrot.encode("xyz")))
    seen: list[Event] = []
    while parrot.step() is not StepOutcome.IDLE:
        seen += parrot.poll()
    parrot.poll()
    assert "".join(e.text for e in seen) == "xyz" and {e.request for e in seen} == {number}


def test_without_logprobs_there_are_none(parrot: Engine) -> None:
    assert {e.logprob for e in parrot.generate("ab")} == {None}


def test_prompt_tokens_are_scored_when_asked(parrot: Engine) -> None:
    events = list(parrot.generate("abc", Sampling(max_tokens=1, logprobs=1), score_prompt=True))
    scores = [e for e in events if e.kind is EventKind.PROMPT_SCORE]
    assert [(e.token, e.position) for e in scores] == [(97, 0), (98, 1), (99, 2)]
    assert scores[0].logprob is None and scores[1].logprob is not None


def test_several_prompts_are_computed_together(parrot: Engine) -> None:
    answers = parrot.answer(["one", "two", "three"], Sampling(n=2))
    assert [[a.text for a in pair] for pair in answers] == [["one"] * 2, ["two"] * 2, ["three"] * 2]
    alone = Stats(steps=len("one") + len("two") + len("three") + 3)
    assert parrot.stats().steps < alone.steps


def test_two_generators_at_once_get_their_own_events(parrot: Engine) -> None:
    first, second = parrot.stream("aaaa"), parrot.stream("bbbb")
    assert "".join(x + y for x, y in zip(first, second, strict=True)) == "abababab"


def test_closing_an_iterator_cancels_its_request(parrot: Engine) -> None:
    events = parrot.generate("hello", Sampling(ignore_eos=True))
    next(iter(events))
    del events
    gc.collect()
    parrot.step()
    assert parrot.step() is StepOutcome.IDLE
    assert parrot.stats().requests_cancelled == 1


def test_an_iterator_that_was_never_read_cancels_too(parrot: Engine) -> None:
    parrot.generate("hello", Sampling(ignore_eos=True))
    gc.collect()
    parrot.step()
    assert parrot.step() is StepOutcome.IDLE


def test_max_tokens_ends_with_length(parrot: Engine) -> None:
    assert list(parrot.generate("hello", Sampling(max_tokens=2)))[-1].finish is Finish.LENGTH


def test_stop_strings_reach_the_core(parrot: Engine) -> None:
    assert "".join(parrot.stream("hello, you", Sampling(stop=(",",)))) == "hello"


@pytest.mark.parametrize(
    ("sampling", "word"),
    [
        (Sampling(temperature=-1), "temperature"),
        (Sampling(temperature=float("nan")), "temperature"),
        (Sampling(top_p=float("inf")), "top_p"),
        (Sampling(max_tokens=2**32 + 5), "max_tokens"),
        (Sampling(n=0), "n"),
        (Sampling(stop=("a\0b",)), "stop"),
        (Sampling(stop=("",)), "stop"),
        (Sampling(stop=("\ud800",)), "stop"),
        (Sampling(logit_bias={2**40: 1.0}), "logit_bias"),
        (Sampling(stop_tokens=(2**31,)), "stop_tokens"),
        (Sampling(logprobs=-2), "logprobs"),
    ],
)
def test_an_option_that_cannot_be_honoured_is_refused_by_name(parrot: Engine, sampling: Sampling, word: str) -> None:
    with pytest.raises(EdgecError, match=word) as refused:
        parrot.generate("hello", sampling)
    assert refused.value.exit_code is ExitCode.USAGE


def test_a_seed_is_drawn_only_where_it_matters() -> None:
    assert Sampling().with_seed().seed is None and Sampling(temperature=1, seed=5).with_seed().seed == 5
    drawn = {Sampling(temperature=1).with_seed().seed for _ in range(3)}
    assert len(drawn) == 3 and None not in drawn


def test_a_prompt_that_does_not_fit_is_refused_with_its_reason(parrot: Engine) -> None:
    with pytest.raises(EngineError) as refused:
        parrot.generate("x" * 600)
    assert (refused.value.status, refused.value.reason) == (Status.TOO_LONG, Reason.TOO_LONG)


def test_a_full_queue_is_its_own_reason(parrot: Engine) -> None:
    with pytest.raises(EngineError) as refused:
        for _ in range(100):
            parrot.submit(Request([65]))
    assert refused.value.reason is Reason.QUEUE_FULL


def test_tokens_beyond_32_bits_are_refused(parrot: Engine) -> None:
    with pytest.raises(UsageError, match="tokens"):
        parrot.submit(Request([2**33 + 65]))


def test_cancelling_twice_says_that_it_was_over(parrot: Engine) -> None:
    number = parrot.submit(Request(parrot.encode("hello")))
    assert parrot.cancel(number)
    parrot.step()
    assert [e.finish for e in parrot.poll()] == [Finish.CANCELLED]
    assert not parrot.cancel(number)


def test_an_engine_that_failed_raises(parrot: Engine) -> None:
    with pytest.raises(EngineError) as failed:
        list(parrot.generate([1, 1]))
    assert failed.value.exit_code is ExitCode.BUG


def test_memory_budget_and_kernel_reach_the_core(fake_core: ctypes.CDLL, fake_bundle: Path) -> None:
    with pytest.raises(EngineError, match="budget") as refused:
        Engine(fake_bundle, EngineOptions(memory_budget=1), library=fake_core)
    assert refused.value.reason is Reason.OUT_OF_MEMORY
    with pytest.raises(EngineError, match="kernel"):
        Engine(fake_bundle, EngineOptions(kernel="abacus"), library=fake_core)
    with Engine(
        fake_bundle, EngineOptions(kernel="scalar", context=99, prefix_cache=False), library=fake_core
    ) as engine:
        assert engine.context == 99 and engine.description["prefix_cache"] is False


def test_log_and_thermal_hooks_are_called(fake_core: ctypes.CDLL, fake_bundle: Path) -> None:
    lines: list[tuple[LogLevel, str]] = []
    options = EngineOptions(log=lambda level, line: lines.append((level, line)), thermal=lambda: 101)
    with Engine(fake_bundle, options, library=fake_core) as engine:
        list(engine.stream("ab"))
        assert lines == [(LogLevel.INFO, str(engine.folder))]
        assert engine.stats().failures == engine.stats().steps > 0  # how the fake shows that it asked


def test_stats_have_the_wastes(parrot: Engine) -> None:
    before = parrot.stats()
    assert before.occupancy is before.utilisation is before.scheduling is before.recomputed is None
    parrot.answer(["abcd", "efgh"])
    gone = parrot.stats().since(before)
    assert gone.occupancy is not None and 0 < gone.occupancy <= 0.5
    assert gone.utilisation == 15 / 16
    assert gone.scheduling == pytest.approx(0.05)


def test_trim_takes_its_level(parrot: Engine) -> None:
    parrot.trim(Trim.CRITICAL)
    assert parrot.stats().preemptions == Trim.CRITICAL


def test_forward_passes_arrays_in_the_header_s_order(parrot: Engine) -> None:
    rows = np.array([3, 4], np.int32)
    logits, hidden = parrot.forward(
        rows, rows + 10, rows + 20, np.array([1, 0]), np.array([[7, 8], [9, 6]]), hidden_size=2
    )
    assert logits.shape == (2, 258) and hidden is not None
    assert logits[:, 1].tolist() == [3 * 1000 + 1 + 9, 4 * 1000 + 1 + 7]
    assert hidden.tolist() == [[13, 23], [14, 24]]
    with pytest.raises(UsageError):
        parrot.forward(rows, rows[:1], rows, rows, np.zeros((1, 1)))


def test_text_goes_to_tokens_and_back(parrot: Engine) -> None:
    text = "é<|im_end|>\0"
    assert parrot.encode(text)[:3] == [0xC3, 0xA9, ord("<")]
    assert parrot.encode(text, special=True) == [0xC3, 0xA9, 257, 0]
    assert parrot.decode_bytes([0xC3, 257]) == b"\xc3<|im_end|>"
    assert parrot.decode([0xC3, 0xA9, 257]) == "é" and parrot.decode([0xC3]) == "\ufffd"
    assert parrot.decode_bytes([256] * 500) == b"<|im_start|>" * 500  # more than the first guess at its size
    assert parrot.encode("") == []
    with pytest.raises(UsageError, match="Unicode"):
        parrot.encode("\ud800")


def test_a_closed_engine_refuses_and_closing_again_is_nothing(parrot: Engine) -> None:
    parrot.close()
    parrot.close()
    with pytest.raises(EngineError, match="closed"):
        parrot.submit(Request([65]))


def test_closing_waits_for_calls_inside(
    fake_core: ctypes.CDLL, fake_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`step` sleeps inside the core, and reads the engine afterwards: freed under it, that would crash."""
    engine = Engine(fake_bundle, library=fake_core)
    engine.submit(Request([65]))
    monkeypatch.setenv("FAKE_STEP_US", "50000")
    outcomes: list[StepOutcome] = []
    thread = threading.Thread(target=lambda: outcomes.append(engine.step()))
    thread.start()
    while engine._inside == 0 and thread.is_alive():
        pass
    engine.close()
    assert engine._inside == 0
    thread.join()
    assert outcomes == [StepOutcome.COMMITTED]


# ---- The driver ----


class Inbox:
    """Collects a request's events, and lets a test wait for its end."""

    def __init__(self, n: int = 1) -> None:
        self.events: list[Event] = []
        self._left = n
        self._over = threading.Event()

    def __call__(self, events: object) -> None:
        assert isinstance(events, list)
        self.events += events
        self._left -= sum(e.kind is EventKind.FINISH for e in events)
        if self._left == 0:
            self._over.set()

    def wait(self) -> list[Event]:
        assert self._over.wait(30), "no end was delivered"
        return self.events


@pytest.fixture
def driver(parrot: Engine) -> Driver:
    made = Driver(parrot)
    made.start()
    return made


def test_the_driver_delivers_each_request_to_its_own(driver: Driver) -> None:
    inboxes = [Inbox() for _ in range(8)]
    for i, inbox in enumerate(inboxes):
        driver.submit(Request([65 + i] * (i + 1)), inbox)
    texts = ["".join(e.text for e in inbox.wait()) for inbox in inboxes]
    assert texts == [chr(65 + i) * (i + 1) for i in range(8)]
    assert driver.open_requests == 0
    driver.stop()


def test_the_driver_goes_on_after_it_was_idle(driver: Driver) -> None:
    for _ in range(3):
        inbox = Inbox()
        driver.submit(Request([65]), inbox)
        inbox.wait()
    driver.stop()


def test_cancelling_through_the_driver_ends_a_long_answer(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_STEP_US", "20000")  # ten seconds until the context is full
    inbox = Inbox()
    number = driver.submit(Request([65], Sampling(ignore_eos=True)), inbox)
    driver.cancel(number)
    assert inbox.wait()[-1].finish is Finish.CANCELLED
    driver.stop()


def test_stopping_the_driver_ends_every_request(parrot: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_STEP_US", "2000")
    driver = Driver(parrot)
    driver.start()
    inboxes = [Inbox(2) for _ in range(6)]
    for inbox in inboxes:
        driver.submit(Request([65], Sampling(ignore_eos=True, n=2)), inbox)
    driver.stop()
    assert {e.finish for inbox in inboxes for e in inbox.wait() if e.kind is EventKind.FINISH} == {Finish.CANCELLED}
    with pytest.raises(EngineError, match="stopped"):
        driver.submit(Request([65]), Inbox())


def test_one_failed_request_does_not_end_the_others(driver: Driver) -> None:
    bad, good = Inbox(), Inbox()
    driver.submit(Request([1, 1]), bad)
    driver.submit(Request([65, 66]), good)
    assert bad.wait()[-1].finish is Finish.FAILED
    assert good.wait()[-1].finish is Finish.STOP and driver.failure is None
    driver.stop()


def test_an_engine_that_breaks_fails_every_request_and_says_why(driver: Driver) -> None:
    inbox = Inbox(3)
    driver.submit(Request([2, 2], Sampling(n=3)), inbox)
    assert [e.finish for e in inbox.wait() if e.kind is EventKind.FINISH] == [Finish.FAILED] * 3
    assert driver.failure == "the prompt had bytes 2"
    with pytest.raises(EngineError, match="bytes 2"):
        driver.submit(Request([65]), Inbox())
    driver.stop()


# ---- Bundles ----


def test_a_bundle_is_found_from_each_of_its_folders(fake_bundle: Path) -> None:
    native = fake_bundle / "bundle/native"
    assert {native_folder(p) for p in (fake_bundle, fake_bundle / "bundle", native)} == {native.resolve()}
    assert bundle_name(native) == "parrot"


def test_a_bundle_without_the_runtime_says_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "bundle/tflite").mkdir(parents=True)
    (tmp_path / "bundle/bundle.json").write_text("{}")
    with pytest.raises(UsageError, match="tflite") as refused:
        native_folder(tmp_path)
    assert "native" in refused.value.hint
    with pytest.raises(UsageError, match="no bundle at"):
        native_folder(tmp_path / "nowhere")
