"""Standard input and output, with a real engine in a real process."""

import contextlib
import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.wire import FAULTY, ROOT, Lines, Stdio, command, resident_kilobytes, start, stop

LONG = {"op": "generate", "prompt": "Hello", "max_tokens": 4000, "ignore_eos": True}  # several seconds of work
SHORT = {**LONG, "max_tokens": 3}


@pytest.fixture(scope="module")
def shared(tiny: Path) -> Iterator[Stdio]:
    """One process for the tests that leave it as they found it."""
    with Stdio(tiny) as engine:
        yield engine.ready()


@contextlib.contextmanager
def narrow(model: Path, *options: object) -> Iterator[Stdio]:
    """An engine that is ready and writes to a pipe of 4 kB."""
    reads, writes = os.pipe()
    fcntl.fcntl(writes, fcntl.F_SETPIPE_SZ, 4096)
    with Stdio(model, *options, stdout=writes) as engine:
        os.close(writes)
        engine.reads = reads
        engine.ready()
        yield engine
    os.close(reads)


def last(events: list[dict[str, Any]]) -> dict[str, Any]:
    return events[-1]


# The conversation


def test_start_and_end(tiny: Path) -> None:
    with Stdio(tiny) as engine:
        hello, *loading, ready = engine.until("ready")
        assert hello["event"] == "hello" and hello["protocol"] == 1 and hello["ops"][0] == "generate"
        assert {each["event"] for each in loading} <= {"loading"}
        assert ready["model"]["architecture"] == "llama" and ready["timings"]["executor_ms"] > 0
        engine.end_input()
        assert engine.rest() == [] and engine.code() == 0 and engine.complaints() == ""


# Says on stderr when the tokenizer's dictionaries are made, which the model's few words do not make necessary.
PREPARING = """
import sys
from reflex_ipc import bpe, cli
bpe._PATIENCE = 1e9
prepare = bpe.BytePairs.prepare
def said(pairs):
    prepare(pairs)
    print("prepared", file=sys.stderr, flush=True)
    {then}
bpe.BytePairs.prepare = said
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("then", ["pass", "raise bpe.ModelFileError('two tokens are equal')"])
def test_dictionaries_are_made_after_two_requests(tiny: Path, then: str) -> None:
    """Not for one request, which would have to wait for them at its end; and once, whatever is wrong with them."""
    for n in (1, 2, 4):
        with Stdio(tiny, runs=("-c", PREPARING.format(then=then))) as engine:
            engine.ready()
            answers = [last(engine.answer({"id": i, **SHORT}))["text"] for i in range(n)]
            assert len(set(answers)) == 1
            if n > 1:
                assert engine.process.stderr
                assert Lines(engine.process.stderr.fileno(), -1).line() == b"prepared\n"
            else:
                time.sleep(0.2)
            engine.end_input()
            assert engine.rest() == [] and engine.code() == 0 and engine.complaints() == ""


def test_dictionaries_are_not_made_when_the_input_has_ended(tiny: Path) -> None:
    """Nobody will ask for them: a pipe's end would only come later."""
    with Stdio(tiny, runs=("-c", PREPARING.format(then="pass"))) as engine:
        engine.ready()
        engine.process.send_signal(signal.SIGSTOP)  # all requests and the end are there before it looks
        engine.send(*({"id": i, **SHORT} for i in range(4)))
        engine.end_input()
        engine.process.send_signal(signal.SIGCONT)
        assert [event["id"] for event in engine.rest() if event["event"] == "done"] == [0, 1, 2, 3]
        assert engine.code() == 0 and engine.complaints() == ""


@pytest.mark.model
def test_loading_is_reported(smollm2: Path) -> None:
    with Stdio(smollm2) as engine:
        _, *loading, _ = engine.until("ready")
        done = [each["bytes"] for each in loading]
        assert done and done == sorted(done) and {each["total"] for each in loading} == {done[-1]}


def test_events_of_a_generation(shared: Stdio) -> None:
    started, *tokens, done = shared.answer({"id": "a", **SHORT, "max_tokens": 20})
    assert started == {"id": "a", "event": "started", "prompt_tokens": 3}
    assert [each["index"] for each in tokens] == list(range(len(tokens)))
    assert "".join(each["text"] for each in tokens) == done["text"]
    assert done["usage"] == {"prompt_tokens": 3, "reused_tokens": 0, "completion_tokens": 20}
    assert done["finish_reason"] == "length"
    assert {"queued_ms", "prompt_ms", "first_token_ms"} <= set(done["timings"])
    for each in tokens:
        # The model writes nonsense, half characters included: `bytes` stand wherever the text isn't the token's.
        if each["token"] is not None:
            own = shared.answer({"id": 0, "op": "detokenize", "tokens": [each["token"]]})[0]["text"]
            assert ("bytes" in each) == (each["text"] != own or "\ufffd" in own), each
            assert bytes(each.get("bytes", own.encode())).decode("utf-8", "replace") == own
    assert any("bytes" in each for each in tokens)


def test_withheld_text_is_flushed(shared: Stdio) -> None:
    events = shared.answer({"id": 1, **SHORT})
    assert events[-2]["token"] is None and events[-2]["logprob"] is None and events[-2]["text"] == "\ufffd"
    text = shared.answer({"id": 2, **SHORT, "max_tokens": 2})[-1]["text"]
    begun = shared.answer({"id": 3, **SHORT, "max_tokens": 2, "stop": [text[-1] + "never"]})
    assert begun[-2] == {"id": 3, "event": "token", "index": 2, "token": None, "text": text[-1], "logprob": None}
    assert begun[-1]["text"] == text and begun[-1]["finish_reason"] == "length"
    stopped = shared.answer({"id": 4, **SHORT, "stop": [text[1:]]})
    assert stopped[-1]["finish_reason"] == "stop_string" and stopped[-1]["text"] == text[:1]


def test_finish_reasons(shared: Stdio, tiny: Path) -> None:
    assert shared.answer({"id": 1, **LONG, "deadline_ms": 50})[-1]["finish_reason"] == "deadline"
    started = shared.answer({"id": 1, "op": "generate", "prompt": "Hello", "max_tokens": 0})
    assert [each["event"] for each in started] == ["started", "done"] and started[-1]["finish_reason"] == "length"
    eog = {str(each): 1e9 for each in shared.answer({"id": 1, "op": "info"})[0]["model"]["eog"]}
    done = shared.answer({"id": 1, "op": "generate", "prompt": "Hello", "logit_bias": eog})[-1]
    assert done["finish_reason"] == "stop" and done["usage"]["completion_tokens"] == 0 and done["text"] == ""
    with Stdio(tiny, "-c", 6) as small:
        small.ready()
        done = small.answer({"id": 1, **LONG})[-1]
        assert done["finish_reason"] == "context" and done["usage"]["completion_tokens"] == 3
        done = small.answer({"id": 1, "op": "generate", "tokens": [1] * 6})[-1]
        assert done["finish_reason"] == "context" and done["usage"]["completion_tokens"] == 0
        error = small.answer({"id": 1, "op": "generate", "tokens": [1] * 7})[-1]
        assert error["code"] == "context_overflow"


def test_prompts_by_text_tokens_and_messages(shared: Stdio) -> None:
    ids = shared.answer({"id": 1, "op": "tokenize", "text": "Hello"})[0]["tokens"]
    by_text = shared.answer({"id": 1, **SHORT})
    by_ids = shared.answer({"id": 1, "op": "generate", "tokens": ids, "max_tokens": 3, "ignore_eos": True})
    assert [each.get("token") for each in by_text] == [each.get("token") for each in by_ids]
    chat = {"id": 1, "op": "generate", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    started, *_, done = shared.answer(chat)
    assert started["prompt_tokens"] > 3 and done["event"] == "done"


def test_sampling_reaches_the_engine(shared: Stdio) -> None:
    def tokens(**fields: Any) -> list[Any]:
        return [
            each["token"] for each in shared.answer({"id": 1, **SHORT, **fields})[1:-1] if each["token"] is not None
        ]

    assert tokens(logit_bias={"77": 1e9}) == [77, 77, 77]
    hot = {"temperature": 50.0, "max_tokens": 8}
    assert tokens(**hot, seed=1) == tokens(**hot, seed=1) != tokens(**hot, seed=2)
    events = shared.answer({"id": 1, **SHORT, "top_logprobs": 20})
    top = events[1]["top_logprobs"]
    assert len(top) == 20 and top[0]["token"] == events[1]["token"] and top[0]["logprob"] == events[1]["logprob"]
    assert [each["logprob"] for each in top] == sorted((each["logprob"] for each in top), reverse=True)
    assert shared.answer({"id": 7, **SHORT, "temperature": -1})[-1]["code"] == "invalid_request"
    assert "temperature" in shared.answer({"id": 7, **SHORT, "temperature": -1})[-1]["message"]


def test_a_bad_line_and_on(shared: Stdio) -> None:
    shared.send(b"rubbish\n", b"\r\n\n", b'{"id":2,"op":"info","x":1}\n', {"id": 3, "op": "tokenize", "text": ""})
    first, second, third = (shared.event() for _ in range(3))
    assert (first["id"], first["code"]) == (None, "invalid_json")
    assert (second["id"], second["code"], second["field"]) == (2, "invalid_request", "x")
    assert third["event"] == "result"
    for request, code in [
        ({"op": "generate", "prompt": ""}, "invalid_request"),
        ({"op": "generate", "tokens": []}, "invalid_request"),
        ({"op": "generate", "tokens": [99999]}, "invalid_request"),
        ({"op": "detokenize", "tokens": [99999]}, "invalid_request"),
        ({"op": "generate", "tokens": [1] * 5000}, "context_overflow"),
        ({"op": "generate", "prompt": "x", "logit_bias": {"99999": 1}}, "invalid_request"),
    ]:
        error = last(shared.answer({"id": "é", **request}))
        assert (error["event"], error["code"], error["id"]) == ("error", code, "é"), error


def test_failures_inside_the_engine(tiny: Path) -> None:
    """Only a lost device is the end; everything else is one request's."""
    with Stdio(tiny, runs=FAULTY) as engine:
        engine.ready()
        memory = last(engine.answer({"id": 1, "op": "detokenize", "tokens": [14]}))
        defect = last(engine.answer({"id": 2, "op": "detokenize", "tokens": [15]}))
        assert memory["code"] == "out_of_memory" and "fatal" not in memory
        assert defect["code"] == "internal" and defect["message"] == "ZeroDivisionError: what nobody foresaw"
        assert last(engine.answer({"id": 3, **SHORT}))["event"] == "done"
        engine.send({"id": 4, "op": "detokenize", "tokens": [13]}, {"id": 5, **SHORT})
        (device,) = engine.rest()
        assert (device["id"], device["code"], device["fatal"], device["exit_code"]) == (4, "device", True, 5)
        assert engine.code() == 5
        assert "Traceback" in engine.complaints()  # of the defect: somebody has to find it


def test_the_launcher_starts_it_without_site(tiny: Path) -> None:
    """As the installed command does, which completes the path only where something needs it."""
    arguments = [sys.executable, "-I", "-S", str(ROOT / "reflex_ipc" / "__main__.py"), *command("stdio", tiny)[3:]]
    result = subprocess.run(arguments, input=b'{"id":1,"op":"info"}', capture_output=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1])["event"] == "result"


def test_end_of_input_answers_everything(tiny: Path) -> None:
    with Stdio(tiny) as engine:
        engine.send(*({"id": i, **SHORT} for i in range(5)), json.dumps({"id": 5, "op": "info"}).encode())
        engine.end_input()
        events = engine.rest()
        assert [each["id"] for each in events if each["event"] in ("done", "result")] == [0, 1, 2, 3, 4, 5]
        assert engine.code() == 0


def test_files_for_both(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "in").write_text(json.dumps({"id": 1, **SHORT}) + "\n")
    with (
        open(tmp_path / "in") as source,
        open(tmp_path / "out", "w") as sink,
        Stdio(tiny, stdin=source, stdout=sink) as engine,
    ):
        assert engine.code() == 0
    assert json.loads((tmp_path / "out").read_text().splitlines()[-1])["event"] == "done"


def test_a_terminal(tiny: Path) -> None:
    ours, theirs = pty.openpty()
    with Stdio(tiny, stdin=theirs, stdout=subprocess.PIPE) as engine:
        os.close(theirs)
        engine.writes = ours
        engine.ready()
        assert last(engine.answer({"id": 1, **SHORT}))["event"] == "done"
        os.close(ours)  # the terminal goes away: that is the end of input
        assert engine.rest() == [] and engine.code() == 0


# A start that fails


@pytest.mark.parametrize(("name", "code"), [("missing.gguf", 3), ("empty.gguf", 3), ("folder", 3)])
def test_a_model_that_cannot_be_opened(tmp_path: Path, name: str, code: int) -> None:
    (tmp_path / "empty.gguf").touch()
    (tmp_path / "folder").mkdir()
    with Stdio(tmp_path / name) as engine:
        hello, error = engine.rest()
        assert hello["event"] == "hello"
        assert error["id"] is None and error["code"] == "model_file" and error["fatal"] is True
        assert error["exit_code"] == engine.code() == code and name in error["message"]


def test_a_name_that_is_not_utf8(tmp_path: Path) -> None:
    with Stdio(os.fsdecode(bytes(tmp_path) + b"/\xff\xfe.gguf")) as engine:
        error = engine.rest()[-1]
        assert error["fatal"] is True and "\\udcff\\udcfe.gguf" in error["message"]


# Descriptors


def test_stray_prints_break_no_line(tiny: Path) -> None:
    with Stdio(tiny, runs=FAULTY) as engine:
        engine.ready()
        assert last(engine.answer({"id": 1, "op": "info"}))["event"] == "result"
        target = os.readlink(f"/proc/{engine.process.pid}/fd/1")
        assert target == os.readlink(f"/proc/{engine.process.pid}/fd/2")
        assert os.readlink(f"/proc/{engine.process.pid}/fd/0") == "/dev/null"
        engine.end_input()
        assert engine.rest() == [] and engine.code() == 0
        assert engine.complaints().splitlines() == ["stray print", "stray write", "stray child"]


def test_the_mode_of_inherited_descriptors_is_left_alone(shared: Stdio) -> None:
    last(shared.answer({"id": 1, "op": "info"}))
    pid = shared.process.pid
    for fd in os.listdir(f"/proc/{pid}/fd"):
        if os.readlink(f"/proc/{pid}/fd/{fd}").startswith("pipe:"):
            flags = Path(f"/proc/{pid}/fdinfo/{fd}").read_text().split("flags:")[1].split()[0]
            ours = [shared.reads, shared.writes]
            inode = os.stat(f"/proc/{pid}/fd/{fd}").st_ino
            if inode in [os.fstat(each).st_ino for each in ours]:
                assert not int(flags, 8) & os.O_NONBLOCK


# Cancel


def test_cancel_ends_a_running_request_at_once(shared: Stdio) -> None:
    shared.send({"id": 1, **LONG})
    shared.until("token")
    shared.send({"id": 2, "op": "cancel", "target": 1})
    *before, done = shared.until("done", id=1)
    (place,) = [i for i, each in enumerate(before) if each["id"] == 2]
    assert before[place] == {"id": 2, "event": "result", "target": 1, "found": "running"}
    assert sum(each["token"] is not None for each in before[place + 1 :]) <= 1
    assert done["finish_reason"] == "cancelled" and 1 <= done["usage"]["completion_tokens"] < 4000


def test_cancel_during_the_prompt(shared: Stdio) -> None:
    shared.send({"id": 1, "op": "generate", "tokens": [5] * 4000, "max_tokens": 1})
    shared.until("started")
    shared.send({"id": 2, "op": "cancel", "target": 1})
    ack, done = shared.event(), shared.event()
    assert ack["found"] == "running" and done["finish_reason"] == "cancelled"
    assert done["usage"] == {"prompt_tokens": 4000, "reused_tokens": 0, "completion_tokens": 0}


def test_cancel_a_waiting_request(shared: Stdio) -> None:
    shared.send({"id": 1, **LONG})
    shared.until("token")
    shared.send({"id": 2, **LONG}, {"id": 3, "op": "cancel", "target": 2}, {"id": 4, "op": "cancel", "target": 1})
    events = shared.until("done", id=1)
    assert [each["found"] for each in events if each["event"] == "result"] == ["waiting", "running"]
    done = shared.event()
    assert (done["id"], done["finish_reason"], done["text"]) == (2, "cancelled", "")
    assert done["usage"]["completion_tokens"] == 0 and done["timings"]["queued_ms"] > 0


def test_other_lines_wait_while_a_request_runs(shared: Stdio) -> None:
    shared.send({"id": 1, **LONG, "max_tokens": 50})
    shared.until("started")
    shared.send({"id": 2, "op": "info"}, b"rubbish\n", {"id": 3, "op": "cancel", "target": "nobody"})
    events = shared.until("error")
    ids = [each["id"] for each in events if each["event"] != "token"]
    assert ids == [3, 1, 2, None]


def test_a_deadline_counts_the_time_in_the_queue(shared: Stdio) -> None:
    shared.send({"id": 1, **LONG, "deadline_ms": 300}, {"id": 2, **LONG, "deadline_ms": 300}, {"id": 3, **SHORT})
    first = shared.until("done")[-1]
    second = shared.event()
    third = shared.until("done")[-1]
    assert first["finish_reason"] == "deadline" and first["usage"]["completion_tokens"] > 0
    assert (second["id"], second["finish_reason"], second["usage"]["completion_tokens"]) == (2, "deadline", 0)
    assert second["timings"]["queued_ms"] >= 300
    assert third["id"] == 3 and third["finish_reason"] == "length" and third["timings"]["queued_ms"] >= 300


def test_deadlines_do_not_ask_for_the_time_of_day(tiny: Path) -> None:
    """Setting the clock changes nothing, because nobody looks at it: asking for it is an error in this process."""
    with Stdio(tiny, "--write-timeout", 5000, runs=FAULTY) as engine:
        engine.ready()
        began = time.monotonic()
        done = last(engine.answer({"id": 1, **LONG, "deadline_ms": 300}))
        assert done["finish_reason"] == "deadline" and 0.3 <= time.monotonic() - began < 5


def test_cancels_behind_a_full_buffer_wait(tiny: Path) -> None:
    with Stdio(tiny, "--limit-line", 1000) as engine:
        engine.ready()
        engine.send({"id": 1, **LONG, "max_tokens": 300})
        engine.until("token")
        padding = json.dumps({"id": 0, "op": "tokenize", "text": "x" * 900}).encode() + b"\n"
        engine.send(padding, padding, {"id": 2, "op": "cancel", "target": 1})
        events = engine.until("result", id=2)
        assert [each["finish_reason"] for each in events if each["event"] == "done"] == ["length"]
        assert events[-1]["found"] == "unknown"


def test_a_flood_of_cancels_does_not_hold_a_request_up(tiny: Path) -> None:
    with Stdio(tiny) as engine:
        engine.ready()
        engine.send({"id": 1, **LONG, "max_tokens": 30})
        stop_sending = threading.Event()

        def flood() -> None:
            while not stop_sending.is_set():
                engine.send(b'{"id": 2, "op": "cancel", "target": 3}\n' * 100)

        thread = threading.Thread(target=flood)
        thread.start()
        try:
            assert engine.until("done")[-1]["finish_reason"] == "length"
        finally:
            stop_sending.set()
            while thread.is_alive():
                with contextlib.suppress(TimeoutError):
                    engine.event(0.1)
            thread.join()


# Limits


def test_a_limit_on_the_prompt(tiny: Path) -> None:
    with Stdio(tiny, "--limit-prompt", 3, "--limit-tokens", 2, "--limit-line", 200) as engine:
        hello = engine.event()
        assert (hello["limits"]["prompt_tokens"], hello["limits"]["max_tokens"]) == (3, 2)
        engine.ready()
        assert last(engine.answer({"id": 1, "op": "generate", "prompt": "Hello"}))["usage"]["completion_tokens"] == 2
        error = last(engine.answer({"id": 2, "op": "generate", "prompt": "Hello there"}))
        assert error["code"] == "context_overflow" and "at most 3" in error["message"]
        ask = {"id": 6, "op": "score", "prompt": "a", "candidates": ["b"], "neutral": "Hello there"}
        error = last(engine.answer(ask))
        assert (error["code"], error["field"]) == ("context_overflow", "neutral") and "at most 3" in error["message"]
        assert last(engine.answer({"id": 3, "op": "generate", "prompt": "a", "max_tokens": 3}))["field"] == "max_tokens"
        engine.send({"id": 4, "op": "tokenize", "text": "x" * 200})
        error = engine.event()
        assert (error["id"], error["code"]) == (4, "invalid_json") and "200 bytes" in error["message"]
        assert last(engine.answer({"id": 5, "op": "tokenize", "text": "x"}))["event"] == "result"


# Readers


def test_a_reader_that_goes_away_while_idle(tiny: Path) -> None:
    with Stdio(tiny) as engine:
        engine.ready()
        assert engine.process.stdout
        engine.process.stdout.close()
        assert engine.code() == -signal.SIGPIPE


@pytest.mark.parametrize("request_", [LONG, {"op": "generate", "tokens": [5] * 4000, "max_tokens": 4000}])
def test_a_reader_that_goes_away_during_a_request(tiny: Path, request_: dict[str, Any]) -> None:
    with Stdio(tiny) as engine:
        engine.ready()
        engine.send({"id": 1, **request_}, {"id": 2, **LONG})
        engine.until("started")
        assert engine.process.stdout
        engine.process.stdout.close()
        began = time.monotonic()
        assert engine.code() == -signal.SIGPIPE
        assert time.monotonic() - began < 2  # either request takes longer
        assert engine.complaints() == ""


@pytest.mark.model
def test_a_reader_that_goes_away_while_loading(smollm2: Path) -> None:
    with Stdio(smollm2) as engine:
        engine.event()
        assert engine.process.stdout
        engine.process.stdout.close()
        assert engine.code() == -signal.SIGPIPE and engine.complaints() == ""


def test_a_full_disk(tiny: Path) -> None:
    with open("/dev/full", "w") as full, Stdio(tiny, stdout=full) as engine:
        assert engine.code() == 11
        assert "No space left on device" in engine.complaints()


def test_a_reader_that_reads_nothing(tiny: Path) -> None:
    with narrow(tiny, "--write-timeout", 500) as engine:
        began = time.monotonic()
        engine.send({"id": 1, **LONG})
        assert engine.code() == 11
        assert 0.5 <= time.monotonic() - began < 10
        assert "the reader took nothing" in engine.complaints()


def test_an_event_larger_than_the_pipe(tiny: Path) -> None:
    """It is written in pieces that never block: to a reader that reads nothing the time-out applies as well."""
    with narrow(tiny, "--write-timeout", 500) as engine:
        large = {"op": "tokenize", "text": "x y z " * 10_000}
        assert len(engine.answer({"id": 1, **large})[0]["tokens"]) > 10_000
        engine.send({"id": 2, **large})
        assert engine.code() == 11


def test_waiting_for_a_reader_costs_nothing(tiny: Path) -> None:
    """Also when the input has ended, which `poll` would go on reporting."""
    with narrow(tiny) as engine:
        engine.send({"id": 1, **LONG}, *({"id": 2, "op": "tokenize", "text": "x" * 1000} for _ in range(4000)))
        engine.end_input()
        time.sleep(0.5)

        def ticks() -> int:
            user, system = Path(f"/proc/{engine.process.pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
            return int(user) + int(system)

        before = ticks()
        time.sleep(0.5)
        assert ticks() - before <= 0.1 * os.sysconf("SC_CLK_TCK")


def test_a_slow_reader_can_still_cancel(tiny: Path) -> None:
    with narrow(tiny) as engine:
        engine.send({"id": 1, **LONG})
        time.sleep(0.5)  # by now the pipe is full
        engine.send({"id": 2, "op": "cancel", "target": 1})
        time.sleep(0.2)
        events = engine.until("done", id=1)
        place = [each["id"] for each in events].index(2)
        # One event was being written, and waits no longer than its reader; then the request is over.
        assert sum(each.get("token") is not None for each in events[place:]) <= 1
        assert events[-1]["usage"]["completion_tokens"] < 200


def test_a_client_that_only_writes(tiny: Path) -> None:
    """It blocks writing because nothing is read any more, because it reads nothing: the time-out resolves it."""
    with Stdio(tiny, "--write-timeout", 500, "--limit-line", 10000) as engine:
        engine.ready()
        with pytest.raises(BrokenPipeError):
            for i in range(100_000):
                engine.send({"id": i, "op": "tokenize", "text": "x" * 100})
        assert engine.code() == 11


# Signals


def test_sigterm_when_idle(tiny: Path) -> None:
    with Stdio(tiny) as engine:
        engine.ready()
        engine.answer({"id": 1, **SHORT})
        engine.send(b'{"id": 2, "op": "in')  # not a request yet
        time.sleep(0.1)
        engine.process.terminate()
        assert engine.code() == 0 and engine.complaints() == ""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, -15), (signal.SIGINT, -2)])
def test_a_signal_during_a_request(tiny: Path, number: signal.Signals, code: int) -> None:
    with Stdio(tiny) as engine:
        engine.ready()
        engine.send({"id": 1, **LONG})
        engine.until("token")
        engine.process.send_signal(number)
        events = engine.rest()  # asserts that the last line is whole
        assert {each["event"] for each in events} <= {"token"}
        assert engine.code() == code and engine.complaints() == ""


def test_sigint_when_idle(tiny: Path) -> None:
    with Stdio(tiny) as engine:
        engine.ready()
        engine.process.send_signal(signal.SIGINT)
        assert engine.code() == -signal.SIGINT and engine.complaints() == ""


def test_sigterm_with_a_blocked_reader(tiny: Path) -> None:
    with narrow(tiny) as engine:
        engine.send({"id": 1, **LONG})
        time.sleep(0.5)
        began = time.monotonic()
        engine.process.terminate()
        assert engine.code() == -signal.SIGTERM
        assert time.monotonic() - began < 5


@pytest.mark.parametrize("pauses", [[0.6], [0.6, 0.6]])
def test_a_stalled_reader_gets_the_rest_of_the_line(tiny: Path, pauses: list[float]) -> None:
    """It had taken nothing for longer than it is waited for, but that counts from the signal, and what it takes."""
    with Stdio(tiny) as engine:
        engine.ready()
        engine.send({"id": 1, "op": "tokenize", "text": "ab" * 100_000})
        time.sleep(2)
        engine.process.terminate()
        head = b""
        for pause in pauses:
            time.sleep(pause)
            assert engine.process.poll() is None
            head += os.read(engine.reads, 16 << 10)
        engine._buffer = head
        assert [each["event"] for each in engine.rest()] == ["result"]
        assert engine.code() == 0 and engine.complaints() == ""


def test_a_reader_that_stays_away_is_not_waited_for(tiny: Path) -> None:
    with Stdio(tiny) as engine:
        engine.ready()
        engine.send({"id": 1, "op": "tokenize", "text": "ab" * 100_000})
        time.sleep(1)
        began = time.monotonic()
        engine.process.terminate()
        assert engine.code() == 11
        assert 0.9 < time.monotonic() - began < 3


@pytest.mark.model
def test_sigterm_while_loading(smollm2: Path) -> None:
    with Stdio(smollm2) as engine:
        engine.until("hello")  # the model has hundreds of milliseconds to go
        engine.process.terminate()
        engine.rest()
        assert engine.code() == -signal.SIGTERM and engine.complaints() == ""


# Abuse


def test_many_requests_in_flat_memory(shared: Stdio) -> None:
    """10,000 requests of all kinds through one process."""
    kinds = [
        {"op": "generate", "prompt": "Hello", "max_tokens": 1},
        {"op": "generate", "prompt": "Hello", "max_tokens": 1, "temperature": 1, "seed": 1, "stop": ["x"]},
        {"op": "tokenize", "text": "Hello there: é😀"},
        {"op": "detokenize", "tokens": [1, 2, 3]},
        {"op": "info"},
        {"op": "cancel", "target": "nobody"},
        {"op": "nothing"},
        {"op": "generate", "prompt": ""},
    ]
    memory = []
    for batch in range(100):
        ids = range(batch * 100, batch * 100 + 100)
        shared.send(*({"id": i, **kinds[i % len(kinds)]} for i in ids))
        ended = []
        while len(ended) < 100:
            event = shared.event()
            if event["event"] in ("done", "result", "error"):
                ended.append(event["id"])
        assert sorted(ended) == list(ids)
        memory.append(resident_kilobytes(shared.process.pid))
    assert memory[-1] - memory[20] < 1000, memory  # kilobytes, over 8,000 requests


def test_a_line_of_a_gigabyte(tiny: Path) -> None:
    with Stdio(tiny) as engine:
        engine.ready()
        before = resident_kilobytes(engine.process.pid)
        piece = b"x" * (1 << 20)
        engine.send(b'{"id": "big", "op": "tokenize", "text": "')
        for _ in range(1024):
            engine.send(piece)
        error = engine.event()
        assert (error["id"], error["code"]) == ("big", "invalid_json")
        engine.send(b'"}\n', {"id": 2, "op": "info"})
        assert engine.event()["id"] == 2
        assert resident_kilobytes(engine.process.pid) - before < 32_000


def test_a_million_writes_of_one_byte(shared: Stdio) -> None:
    text = json.dumps({"id": 1, "op": "tokenize", "text": "x" * 1000}).encode() + b"\n"
    wanted = 1_000_000 // len(text) + 1
    for _ in range(wanted):
        for at in range(len(text)):
            os.write(shared.writes, text[at : at + 1])
    for _ in range(wanted):
        assert shared.event()["event"] == "result"


def test_vanishing_readers(tiny: Path) -> None:
    """Processes whose reader goes away at some point: every one ends by itself, quietly."""
    for i in range(8):
        with Stdio(tiny) as engine:
            engine.send({"id": 1, **LONG})
            for _ in range(i * 3):
                engine.event()
            assert engine.process.stdout
            engine.process.stdout.close()
            assert engine.code() == -signal.SIGPIPE and engine.complaints() == ""


@pytest.mark.parametrize(("closed", "code"), [(0, 0), (1, 11)])
def test_closed_descriptors(tiny: Path, closed: int, code: int) -> None:
    """A closed input has ended, a closed output takes nothing; neither becomes a file that is opened later."""
    process = start(
        command("stdio", tiny),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: os.close(closed),
    )
    try:
        assert process.wait(30) == code
    finally:
        stop(process)
