"""`edgec run` and `edgec bench` from a shell, over the core that repeats its prompt."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from edgec.cli.conversation import converse
from edgec.runtime import Engine, Sampling
from edgec.runtime.workload import cost_from_bench
from tests.conftest import Done

Run = Callable[..., Done]


@pytest.fixture
def command(fake_library: Path, fake_bundle: Path) -> Callable[..., tuple[list[str], dict[str, str]]]:
    """The words and the environment of `edgec NAME BUNDLE …`."""

    def make(name: str, *arguments: str, step_us: int = 0) -> tuple[list[str], dict[str, str]]:
        environment = os.environ | {"EDGEC_LIBRARY": str(fake_library), "FAKE_STEP_US": str(step_us)}
        return [sys.executable, "-m", "edgec", name, str(fake_bundle), *arguments], environment

    return make


@pytest.fixture
def edgec_run(command: Callable[..., tuple[list[str], dict[str, str]]]) -> Run:
    def run(*arguments: str, name: str = "run", stdin: bytes = b"") -> Done:
        words, environment = command(name, *arguments)
        done = subprocess.run(words, env=environment, input=stdin, capture_output=True, timeout=120)
        return Done(done.returncode, done.stdout.decode(), done.stderr.decode())

    return run


def test_stdout_is_the_answer_and_nothing_else(edgec_run: Run) -> None:
    done = edgec_run("hello, 한글 🙂", "--no-chat")
    assert (done.code, done.stdout, done.stderr) == (0, "hello, 한글 🙂\n", "")


def test_the_chat_template_is_applied_unless_told(edgec_run: Run) -> None:
    assert edgec_run("hi", "--system", "s").stdout == " system\ns \n user\nhi \n assistant\n\n"


def test_a_pipe_is_the_prompt(edgec_run: Run) -> None:
    assert edgec_run("--no-chat", stdin=b"from a pipe\n").stdout == "from a pipe\n"
    assert edgec_run("-", "--no-chat", stdin=b"x").stdout == "x\n"


def test_stats_go_to_stderr(edgec_run: Run) -> None:
    done = edgec_run("hello", "--no-chat", "--stats")
    assert done.stdout == "hello\n"
    for word in ("5 tokens", "tok/s", "first token after", "KV utilisation 93.8%", "step occupancy", "kernel fake"):
        assert word in done.stderr


def test_json_is_one_document(edgec_run: Run) -> None:
    document = edgec_run("hi", "--no-chat", "--json", "--logprobs", "1", "-n", "2").json
    assert [a["text"] for a in document["answers"]] == ["hi", "hi"]
    assert document["answers"][0]["logprobs"] == [-0.25, -0.5]
    assert document["usage"] == {"prompt_tokens": 2, "cached_tokens": 0, "answer_tokens": 4}
    assert document["engine"]["kernel"] == "fake"


def test_several_answers_are_numbered(edgec_run: Run) -> None:
    assert edgec_run("hi", "--no-chat", "-n", "2").stdout == "--- 1\nhi\n--- 2\nhi\n"


def test_max_tokens_and_stop_are_honoured(edgec_run: Run) -> None:
    done = edgec_run("hello", "--no-chat", "--max-tokens", "2")
    assert done.stdout == "he\n" and "cut" in done.stderr
    assert edgec_run("a;b", "--no-chat", "--stop", ";").stdout == "a\n"


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["hi", "--top-p", "0.5"], "--top-p"),
        (["hi", "--logprobs", "2"], "--json"),
        (["hi", "--no-chat", "--system", "s"], "--system"),
        (["hi", "--memory", "much"], "--memory"),
        (["hi", "--memory", "1"], "budget"),
        (["hi", "--kernel", "abacus"], "kernel"),
        (["x" * 600, "--no-chat"], "context"),
        (["hi", "--temperature", "nan"], "temperature"),
    ],
)
def test_what_can_not_be_done_is_one_line_and_exit_code_2(edgec_run: Run, arguments: list[str], word: str) -> None:
    done = edgec_run(*arguments)
    assert done.code == 2 and word in done.stderr and "Traceback" not in done.stderr and done.stdout == ""


@pytest.mark.parametrize("stdin", [b"", b"\xff\xfe"])
def test_a_pipe_without_text_is_refused(edgec_run: Run, stdin: bytes) -> None:
    assert edgec_run(stdin=stdin).code == 2


def test_ctrl_c_stops_the_answer_and_keeps_what_there_is(
    command: Callable[..., tuple[list[str], dict[str, str]]],
) -> None:
    words, environment = command("run", "y" * 200, "--no-chat", "--stats", step_us=20_000)
    process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.read(1) == b"y"
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and rest.endswith(b"\n") and len(rest) < 200
    assert b"ended by cancelled" in errors and b"Traceback" not in errors


def test_a_reader_that_leaves_ends_it_quietly(command: Callable[..., tuple[list[str], dict[str, str]]]) -> None:
    words, environment = command("run", "y" * 200, "--no-chat", step_us=2_000)
    process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.wait(60) == 0 and process.stderr.read() == b""


def test_bench_prints_each_figure(edgec_run: Run) -> None:
    done = edgec_run("--repeats", "1", "--decode", "8", "--prompts", "32,4096", "--batches", "1,2", name="bench")
    assert done.code == 0
    for word in ("prefill", "32 tokens", "batch 2", "of bound", "occupancy", "KV utilisation"):
        assert word in done.stdout
    assert "skipped: prefill of 4096" in done.stderr


def test_bench_s_document_tells_simulate_what_steps_cost(edgec_run: Run, tmp_path: Path) -> None:
    done = edgec_run("--json", "--repeats", "1", "--decode", "8", "--prompts", "32", "--batches", "1,4", name="bench")
    document = done.json
    (tmp_path / "bench.json").write_text(done.stdout)
    table = cost_from_bench(tmp_path / "bench.json").table
    assert [rows for rows, _ in table] == [1, 4, 32] and all(seconds > 0 for _, seconds in table)
    one, four = document["decode"]
    assert one["bound"] == document["bandwidth"] / 1000 and four["bound"] == 4 * one["bound"]
    assert document["mix"]["utilisation"] == 15 / 16 and 0 < document["mix"]["occupancy"] <= 1


@pytest.mark.parametrize("arguments", [["--batches", "1,x"], ["--prompts", "0"], ["--batches", "-1"]])
def test_bench_refuses_sizes_that_are_none(edgec_run: Run, arguments: list[str]) -> None:
    assert edgec_run(*arguments, name="bench").code == 2


# ---- The interactive chat ----


@pytest.fixture
def chat(parrot: Engine, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Types lines; gives what was printed."""

    def type_(*lines: str, system: str | None = None, **sampling: object) -> Done:
        left = list(lines)

        def read() -> str:
            if not left:
                raise EOFError
            return left.pop(0)

        converse(parrot, Sampling(**sampling), system=system, read=read)  # type: ignore[arg-type]
        printed = capfd.readouterr()
        return Done(0, printed.out, printed.err)

    return type_


def test_a_chat_keeps_its_history(chat: Callable[..., Done]) -> None:
    first = " user\none \n assistant\n"
    done = chat("one", "two")
    assert done.stdout == f"{first}\n user\none \n assistant\n{first} \n user\ntwo \n assistant\n\n\n"


def test_new_forgets_and_keeps_the_system_message(chat: Callable[..., Done]) -> None:
    done = chat("one", "/new", "two", system="s")
    assert done.stdout.endswith(" system\ns \n user\ntwo \n assistant\n\n\n") and "one" in done.stdout


def test_drop_forgets_the_oldest_exchange(chat: Callable[..., Done]) -> None:
    done = chat("/drop", "one", "/drop", "two")
    assert done.stdout.endswith("\n user\ntwo \n assistant\n\n\n")
    assert "nothing to forget" in done.stderr and "0 exchanges" in done.stderr


def test_a_full_context_says_how_to_go_on_and_goes_on(chat: Callable[..., Done]) -> None:
    done = chat("x" * 600, "ok")
    assert "no room" in done.stderr and "/drop" in done.stderr
    assert done.stdout == " user\nok \n assistant\n\n\n"


def test_an_answer_that_fills_the_context_says_so(chat: Callable[..., Done]) -> None:
    done = chat("x", ignore_eos=True)
    assert "context of 512 tokens is full" in done.stderr


def test_an_answer_that_is_cut_says_so(chat: Callable[..., Done]) -> None:
    assert "cut at --max-tokens" in chat("hello", max_tokens=2).stderr


def test_unknown_commands_are_not_sent(chat: Callable[..., Done]) -> None:
    done = chat("/hlep", "/help")
    assert "no command /hlep" in done.stderr and "/drop" in done.stderr and done.stdout == "\n"


def on_terminal(words: list[str], environment: dict[str, str], typed: bytes) -> str:
    """What a terminal shows of a command, into which `typed` is typed at once."""
    primary, secondary = pty.openpty()
    process = subprocess.Popen(words, env=environment, stdin=secondary, stdout=secondary, stderr=subprocess.PIPE)
    os.close(secondary)
    os.write(primary, typed)
    seen = b""
    try:
        while piece := os.read(primary, 65536):
            seen += piece
    except OSError:  # how Linux says that the other side is closed
        pass
    os.close(primary)
    assert process.wait(60) == 0
    return seen.decode().replace("\r", "")


def test_a_terminal_gets_no_control_characters(command: Callable[..., tuple[list[str], dict[str, str]]]) -> None:
    """A model that prints an escape sequence must not rename the window. A pipe gets what the model said."""
    text = "a\x1b]0;title\x07b\tc"
    words, environment = command("run", text, "--no-chat")
    assert on_terminal(words, environment, b"") == "a]0;titleb\tc\n"
    assert subprocess.run(words, env=environment, capture_output=True, text=True).stdout == f"{text}\n"


def test_without_a_prompt_a_terminal_chats(command: Callable[..., tuple[list[str], dict[str, str]]]) -> None:
    shown = on_terminal(*command("run"), b"hello\n/quit\n")
    assert "> " in shown and " user\nhello \n assistant\n" in shown
