"""Deaths, restarts, queues and clients that vanish: what happens, and that nothing stays behind."""

import json
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from running import PATIENCE, Sidecar, UdsEngine, engine_command, until

LONG = {"prompt": "Once", "max_tokens": 4000, "ignore_eos": True}
SHORT = {"prompt": "Once", "max_tokens": 2}
HERE = Path(__file__).parent


def fake(scenario: str) -> list[str]:
    return [sys.executable, str(HERE / "fake_engine.py"), scenario]


def events(response: httpx.Response) -> Iterator[str]:
    """The data of server-sent events, pings as "ping"."""
    for line in response.iter_lines():
        if line.startswith("data: "):
            yield line[6:]
        elif line:
            yield line.removeprefix(": ")


def stream(sidecar: Sidecar, body: dict[str, Any]) -> Any:
    return httpx.stream("POST", sidecar.url + "/v1/completions", json={**body, "stream": True}, timeout=PATIENCE)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_stream_headers_and_form(sidecar: Sidecar) -> None:
    with stream(sidecar, SHORT) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-cache, no-transform"
        assert response.headers["x-accel-buffering"] == "no"
        said = list(events(response))
    assert said[-1] == "[DONE]"
    last = json.loads(said[-2])
    assert last["choices"][0]["finish_reason"] == "length"
    assert last["reflex"]["finish_reason"] == "length"


def test_pings(tiny: Path, tmp_path: Path) -> None:
    """A prompt that takes a second or so; the headers and the pings are there while it is read."""
    with (
        Sidecar(tmp_path, "--ping", "0.02", "--", *engine_command("stdio", tiny)) as sidecar,
        stream(sidecar, {"prompt": [5] * 4000, "max_tokens": 2}) as response,
    ):
        said = list(events(response))
    assert said[0] == "ping"
    assert said[-1] == "[DONE]"


def test_kill_9_of_a_child_in_a_stream(tiny: Path, tmp_path: Path) -> None:
    with Sidecar(tmp_path, "--", *engine_command("stdio", tiny)) as sidecar:
        pid = sidecar.engine_pid()
        with stream(sidecar, LONG) as response:
            said = []
            for data in events(response):
                said.append(data)
                if len(said) == 5:
                    os.kill(pid, signal.SIGKILL)
                    began = time.monotonic()
        assert time.monotonic() - began < 2
        error = json.loads(said[-1])["error"]
        assert error["code"] == "engine_gone" and error["type"] == "server_error"
        assert httpx.get(sidecar.url + "/livez").status_code == 200
        sidecar.wait_ready()
        assert sidecar.engine_pid() != pid
        assert sidecar.post("/v1/completions", SHORT).status_code == 200
        assert sidecar.metric("reflex_sidecar_engine_restarts_total") == 1
        # The same without a stream, and as OpenAI's client sees it.
        threading.Timer(0.3, lambda: os.kill(sidecar.engine_pid(), signal.SIGKILL)).start()
        with openai.OpenAI(base_url=sidecar.url + "/v1", api_key="none", max_retries=0) as client:
            with pytest.raises(openai.InternalServerError) as caught:
                client.completions.create(
                    model="llama-f16", prompt="Once", max_tokens=4000, extra_body={"ignore_eos": True}
                )
            assert caught.value.status_code == 502
            sidecar.wait_ready()
            chunks = client.completions.create(
                model="llama-f16", prompt="Once", max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
            )
            next(chunks)
            os.kill(sidecar.engine_pid(), signal.SIGKILL)
            with pytest.raises(openai.APIError, match="the engine ended"):
                list(chunks)


def test_kill_9_of_an_engine_behind_a_socket(tiny: Path, tmp_path: Path) -> None:
    with UdsEngine(tiny, tmp_path) as engine, Sidecar(tmp_path, "--socket", engine.path, "--wait", "1") as sidecar:
        with stream(sidecar, LONG) as response:
            lines = events(response)
            next(lines)
            engine.popen.kill()
            assert json.loads(list(lines)[-1])["error"]["code"] == "engine_gone"
        assert httpx.get(sidecar.url + "/livez").status_code == 200
        ready = httpx.get(sidecar.url + "/readyz")
        assert (ready.status_code, ready.json()["state"]) == (503, "down")
        answer = sidecar.post("/v1/completions", SHORT)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_not_ready")
        assert int(answer.headers["retry-after"]) >= 1
        engine.popen.wait()
        with UdsEngine(tiny, tmp_path):
            sidecar.wait_ready()
            assert sidecar.post("/v1/completions", SHORT).status_code == 200


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("busy", [False, True])
def test_the_engine_dies_with_the_sidecar(tiny: Path, tmp_path: Path, number: signal.Signals, busy: bool) -> None:
    command = engine_command("stdio", tiny)
    with Sidecar(tmp_path, "--", *command, patience="serve.GRACE_S = 0.5") as sidecar:
        pid = sidecar.engine_pid()
        if busy:
            client = socket.create_connection(("127.0.0.1", sidecar.port))
            body = json.dumps({**LONG, "stream": True}).encode()
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
            )
            assert client.recv(100).startswith(b"HTTP/1.1 200")
        sidecar.popen.send_signal(number)
        code = sidecar.popen.wait(PATIENCE)
        until(lambda: not alive(pid), 3)
        assert code in ((0, -number) if number != signal.SIGKILL else (-9,))
        if busy:
            client.close()


def test_a_child_that_hears_nothing_dies_too(tmp_path: Path) -> None:
    """It reads no input and writes no output, so neither closing tells it anything."""
    with Sidecar(tmp_path, "--", *fake("mute"), ready=False) as sidecar:
        pid = sidecar.engine_pid()
        sidecar.popen.kill()
        until(lambda: not alive(pid), 3)


def test_a_command_that_does_not_exist(tmp_path: Path) -> None:
    with Sidecar(tmp_path, "--wait", "0.3", "--", "/nonexistent/reflex", ready=False) as sidecar:
        until(lambda: httpx.get(sidecar.url + "/readyz").json()["restarts"] >= 3)  # after 0, 0.5 and 1.5 s
        ready = httpx.get(sidecar.url + "/readyz")
        assert ready.status_code == 503
        assert ready.json()["error"] == "/nonexistent/reflex: No such file or directory"
        assert httpx.get(sidecar.url + "/livez").status_code == 200
        answer = sidecar.post("/v1/completions", SHORT)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_not_ready")
        assert 1 <= int(answer.headers["retry-after"]) <= 8  # as long as it takes to the next start


@pytest.mark.parametrize(
    ("scenario", "complaint"),
    [
        ("mute", "it is loading its model"),
        ("refuses", "x.gguf: no such file"),
        ("newer", "the engine speaks protocol 2, not 1"),
        ("noise", "the engine wrote a line that is not JSON"),
    ],
)
def test_engines_that_do_not_get_ready(tmp_path: Path, scenario: str, complaint: str) -> None:
    with Sidecar(
        tmp_path, "--wait", "0.8", "--", *fake(scenario), ready=False, patience="links.END_S = 0.2"
    ) as sidecar:
        answer = sidecar.post("/v1/completions", SHORT)
        assert answer.status_code == 503
        assert complaint in answer.json()["error"]["message"]
        assert httpx.get(sidecar.url + "/readyz").status_code == 503


@pytest.mark.parametrize("scenario", ["half line", "garbage"])
def test_engines_that_break_the_protocol(tmp_path: Path, scenario: str) -> None:
    with Sidecar(tmp_path, "--", *fake(scenario)) as sidecar:
        answer = sidecar.post("/v1/completions", SHORT)
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "engine_gone")
        with stream(sidecar, SHORT) as response:
            said = list(events(response))
        assert json.loads(said[0])["choices"][0]["text"] == "a"
        assert json.loads(said[-1])["error"]["code"] == "engine_gone"


def test_what_a_later_protocol_adds_is_ignored(tmp_path: Path) -> None:
    with Sidecar(tmp_path, "--", *fake("normal")) as sidecar:
        answer = sidecar.post("/v1/completions", SHORT).json()
        assert answer["choices"][0]["text"] == "a"
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["reflex"]["finish_reason"] == "boredom"


def test_an_engine_that_does_not_hear_a_cancel_is_killed(tmp_path: Path) -> None:
    with Sidecar(tmp_path, "--", *fake("deaf"), patience="links.STOP_S = 0.3") as sidecar:
        pid = sidecar.engine_pid()
        with stream(sidecar, SHORT) as response:
            lines = events(response)
            next(lines)
        until(lambda: not alive(pid))
        sidecar.wait_ready()
        assert sidecar.metric("reflex_sidecar_running") == 0


def test_score(sidecar: Sidecar) -> None:
    """The log-probabilities are those that a completion gives for the same tokens at the same place."""

    def tokens(text: str) -> list[int]:
        found: list[int] = sidecar.post("/tokenize", {"text": text}).json()["tokens"]
        return found

    ask = {"prompt": "Once", "temperature": 0, "max_tokens": 1, "logprobs": 20, "model": "llama-f16"}
    [likeliest] = sidecar.post("/v1/completions", ask).json()["choices"][0]["logprobs"]["top_logprobs"]
    prompt = tokens("Once")
    known = {
        text: logprob
        for text, logprob in likeliest.items()
        if not text.startswith("bytes:") and tokens("Once" + text)[:-1] == prompt  # it does not merge with the prompt
    }
    assert len(known) >= 5
    answer = sidecar.post("/v1/score", {"prompt": "Once", "candidates": list(known), "model": "llama-f16"}).json()
    assert (answer["object"], answer["model"]) == ("score", "llama-f16")
    assert "id" not in answer and "event" not in answer
    assert {each["text"]: each["logprob"] for each in answer["candidates"]} == pytest.approx(known, abs=1e-4)
    assert sum(each["probability"] for each in answer["candidates"]) == pytest.approx(1)
    neutral = sidecar.post("/v1/score", {"prompt": "More", "candidates": list(known), "neutral": "Once"}).json()
    assert {each["text"]: each["neutral_logprob"] for each in neutral["candidates"]} == pytest.approx(known, abs=1e-4)


def test_score_errors(sidecar: Sidecar, tmp_path: Path) -> None:
    def refused(**fields: Any) -> tuple[int, Any]:
        answer = sidecar.post("/v1/score", {"prompt": "Once", "candidates": ["a"], **fields})
        return answer.status_code, answer.json()["error"]["param"]

    assert refused(id=1) == (400, "id")
    assert refused(op="info") == (400, "op")
    assert refused(candidates="a") == (400, "candidates")
    assert refused(neutral="") == (400, "neutral")
    assert refused(neutral="Once " * 5000) == (400, "neutral")
    assert refused(normalise="sum") == (400, "normalise")
    assert refused(model="another") == (404, None)  # as OpenAI answers
    many = {"prompt": [5] * 10, "candidates": ["a"]}
    assert sidecar.post("/v1/score", many).json()["error"]["param"] == "prompt"
    late = sidecar.post("/v1/score", {"prompt": "Once " * 800, "candidates": ["a", "b"], "deadline_ms": 1})
    assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline")
    with Sidecar(tmp_path, "--", *fake("normal")) as without:
        answer = without.post("/v1/score", {"prompt": "Once", "candidates": ["a"]})
        assert (answer.status_code, answer.json()["error"]["code"]) == (501, "not_implemented")


@pytest.mark.model
def test_readyz_while_loading(smollm2: Path, tmp_path: Path) -> None:
    """503 and the phases so far, then 200; what is asked meanwhile waits, /livez does not."""
    with Sidecar(tmp_path, "--", *engine_command("stdio", smollm2), ready=False) as sidecar:
        first = httpx.get(sidecar.url + "/readyz")
        assert (first.status_code, first.json()["state"]) == (503, "loading")
        assert httpx.get(sidecar.url + "/livez").status_code == 200
        assert sidecar.post("/v1/completions", SHORT).status_code == 200
        last = httpx.get(sidecar.url + "/readyz")
        assert (last.status_code, last.json()["state"]) == (200, "ready")
        [weights] = [each for each in last.json()["loading"] if each["phase"] == "weights"]
        assert weights["bytes"] == weights["total"] > 0


def test_a_long_score_has_its_time_and_its_room(tiny: Path, tmp_path: Path) -> None:
    """An answer of megabytes, after longer than a request may wait for its turn."""
    beginning = "".join(map(chr, random.Random(5).choices(range(97, 123), k=250)))
    candidates = [f"{beginning}{i:04}" for i in range(4096)]
    with Sidecar(tmp_path, "--wait", "0.5", "--", *engine_command("stdio", tiny)) as sidecar:
        began = time.monotonic()
        ask = {"prompt": "Once", "candidates": candidates}
        answer = httpx.post(sidecar.url + "/v1/score", json=ask, timeout=2 * PATIENCE)
        assert answer.status_code == 200, answer.text[:500]
        assert time.monotonic() - began > 1.0 and len(answer.content) > 16 << 20
        assert [each["text"] for each in answer.json()["candidates"]] == candidates
        assert sidecar.post("/v1/completions", SHORT).status_code == 200
        assert sidecar.metric("reflex_sidecar_engine_restarts_total") == 0


def test_bodies_of_other_scripts_take_the_room_they_take(sidecar: Sidecar) -> None:
    """Three megabytes that would be eight with every character escaped, and four are what the engine reads."""
    text = "語é🦜" * 320_000
    body = json.dumps({"text": text}, ensure_ascii=False).encode()
    assert 2_800_000 < len(body) < 4 << 20 < len(json.dumps({"text": text}))
    answer = httpx.post(
        sidecar.url + "/tokenize", content=body, headers={"content-type": "application/json"}, timeout=2 * PATIENCE
    )
    assert answer.status_code == 200, answer.text[:500]
    assert answer.json()["count"] > 1_000_000


@pytest.mark.model
def test_a_client_that_leaves_inside_a_score(smollm2: Path, tmp_path: Path) -> None:
    """The engine ends its pass and stays; it is neither waited for nor killed."""
    with Sidecar(tmp_path, "--", *engine_command("stdio", smollm2)) as sidecar:
        engine = sidecar.engine_pid()
        with pytest.raises(httpx.ReadTimeout):
            ask = {"prompt": "word " * 3000, "candidates": [" a", " b"]}  # minutes
            httpx.post(sidecar.url + "/v1/score", json=ask, timeout=1.0)
        began = time.monotonic()
        assert sidecar.post("/v1/completions", SHORT).status_code == 200
        assert time.monotonic() - began < 15
        late = sidecar.post("/v1/score", {**ask, "deadline_ms": 500})
        assert (late.status_code, late.json()["error"]["param"]) == (504, "deadline_ms")
        assert sidecar.engine_pid() == engine and sidecar.metric("reflex_sidecar_engine_restarts_total") == 0


def test_tokenize(sidecar: Sidecar) -> None:
    answer = sidecar.post("/tokenize", {"text": "Hello"}).json()
    assert answer["count"] == len(answer["tokens"]) > 0
    control = sidecar.post("/tokenize", {"text": "<|im_end|>"}).json()
    plain = sidecar.post("/tokenize", {"text": "<|im_end|>", "special": False}).json()
    assert control["count"] == 1 < plain["count"]
    assert sidecar.post("/tokenize", {"txt": "x"}).json()["error"]["param"] == "txt"
    assert sidecar.post("/tokenize", {"text": 3}).json()["error"]["param"] == "text"
    assert sidecar.post("/tokenize", {}).json()["error"]["param"] == "text"


def test_busy(tiny: Path, tmp_path: Path) -> None:
    with Sidecar(tmp_path, "--queue", "1", "--wait", "2", "--", *engine_command("stdio", tiny)) as sidecar:
        with stream(sidecar, {**LONG, "logprobs": 20}) as response:  # many seconds
            lines = events(response)
            next(lines)
            answers = []
            began = time.monotonic()
            waits = threading.Thread(target=lambda: answers.append(sidecar.post("/v1/completions", SHORT)))
            waits.start()
            until(lambda: sidecar.metric("reflex_sidecar_waiting") == 1)
            answers += [sidecar.post("/v1/completions", SHORT) for _ in range(2)]
            assert sidecar.metric("reflex_sidecar_waiting") == 1  # these two were turned away at once
            waits.join()
            assert time.monotonic() - began >= 2
        assert [answer.status_code for answer in answers] == [503, 503, 503]
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers)
        assert {answer.json()["error"]["code"] for answer in answers} == {"busy"}
        assert sidecar.post("/v1/completions", SHORT).status_code == 200


def test_other_clients_of_the_engine_are_waited_for(tiny: Path, tmp_path: Path) -> None:
    """The engine's socket is not ours alone: somebody else's request is in the way until the wait is over."""
    with UdsEngine(tiny, tmp_path) as engine, Sidecar(tmp_path, "--socket", engine.path, "--wait", "1.2") as sidecar:
        with socket.socket(socket.AF_UNIX) as other:
            other.connect(str(engine.path))
            other.sendall(json.dumps({"id": 1, "op": "generate", **LONG, "top_logprobs": 20}).encode() + b"\n")
            until(lambda: b"started" in other.recv(1 << 16))
            answer = sidecar.post("/v1/completions", SHORT)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "busy")
        assert sidecar.post("/v1/completions", SHORT).status_code == 200


def test_clients_that_vanish(sidecar: Sidecar) -> None:
    """At random points of request and answer; then the engine is free, and nothing is left open."""
    rng = random.Random(8)
    sidecar.post("/v1/completions", SHORT)
    before = len(os.listdir(f"/proc/{sidecar.popen.pid}/fd"))

    def vanish(count: int) -> None:
        for _ in range(count):
            body = json.dumps({**LONG, "stream": rng.random() < 0.7}).encode()
            request = (
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
            )
            with socket.create_connection(("127.0.0.1", sidecar.port), PATIENCE) as client:
                if rng.random() < 0.3:
                    client.sendall(request[: rng.randrange(len(request))])
                else:
                    client.sendall(request)
                    client.settimeout(rng.random() * 0.02)
                    try:
                        while client.recv(1000):
                            if rng.random() < 0.2:
                                break
                    except TimeoutError:
                        pass
                if rng.random() < 0.5:  # a reset in place of an end
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")

    threads = [threading.Thread(target=vanish, args=(50,)) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    until(lambda: sidecar.metric("reflex_sidecar_running") == 0, 5)
    assert sidecar.metric("reflex_sidecar_waiting") == 0
    assert sidecar.post("/v1/completions", SHORT).status_code == 200
    until(lambda: len(os.listdir(f"/proc/{sidecar.popen.pid}/fd")) <= before, 5)
    assert sidecar.metric("reflex_sidecar_engine_restarts_total") == 0
    assert "defect" not in sidecar.text()


def test_clients_that_take_too_long(tiny: Path, tmp_path: Path) -> None:
    patience = "serve.READER_S = serve.HEADERS_S = guard.BODY_S = 0.5"
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with Sidecar(tmp_path, "--", *engine_command("stdio", tiny), patience=patience) as sidecar:
        address = ("127.0.0.1", sidecar.port)
        with socket.create_connection(address, PATIENCE) as client:  # headers that do not end
            client.sendall(head)
            assert client.recv(100) == b""
        with socket.create_connection(address, PATIENCE) as client:  # a body that does not come
            client.sendall(head + b"Content-Length: 100\r\n\r\n{")
            assert client.recv(100).startswith(b"HTTP/1.1 408")
        with socket.socket() as client:  # an answer that is not read
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(address)
            hello = [{"role": "user", "content": "Hello"}]
            more = {"logprobs": True, "top_logprobs": 20, "ignore_eos": True, "stream": True}
            body = json.dumps({"messages": hello, **more}).encode()
            client.sendall(
                head.replace(b"completions", b"chat/completions") + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
            )
            until(lambda: sidecar.metric("reflex_sidecar_running") == 1)
            until(lambda: sidecar.metric("reflex_sidecar_client_gone_total") == 1)
            until(lambda: sidecar.metric("reflex_sidecar_running") == 0)
        assert sidecar.post("/v1/completions", SHORT).status_code == 200
        assert sidecar.metric("reflex_sidecar_engine_restarts_total") == 0


def test_the_first_chunk_is_not_held_back(child: Sidecar) -> None:
    """Headers and first chunk are two packets: with Nagle's algorithm the second would wait 40 ms for the client."""
    seconds = []
    with httpx.Client() as client:
        for _ in range(15):
            began = time.monotonic()
            with client.stream("POST", child.url + "/v1/completions", json={**SHORT, "stream": True}) as response:
                said = events(response)
                next(said)
                seconds.append(time.monotonic() - began)
                assert list(said)[-1] == "[DONE]"
    # With it each of them would take 40 ms; without it a busy machine delays some.
    assert sorted(seconds)[3] < 0.03


def test_more_silent_clients_than_descriptors(tiny: Path, tmp_path: Path) -> None:
    """The longest silent go, also those whose request was answered before it was whole; nothing fills the log."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))"
    with (
        UdsEngine(tiny, tmp_path) as engine,
        Sidecar(tmp_path, "--socket", engine.path, "--wait", "1", patience=limit) as sidecar,
    ):
        clients = []
        for request in (b"", b"GET /livez HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nx"):
            for _ in range(130):
                clients.append(socket.create_connection(("127.0.0.1", sidecar.port)))
                clients[-1].sendall(request)
            time.sleep(0.5)
            assert httpx.get(sidecar.url + "/livez", timeout=5).status_code == 200
        for client in clients:
            client.close()
        assert "out of system resource" not in sidecar.text()


def test_a_body_that_is_never_whole(tiny: Path, tmp_path: Path) -> None:
    """The answer was given, and still the connection does not wait for ever for the rest."""
    patience = "serve.BODY_S = serve.HEADERS_S = 0.3"
    with (
        UdsEngine(tiny, tmp_path) as engine,
        Sidecar(tmp_path, "--socket", engine.path, "--wait", "1", patience=patience) as sidecar,
        socket.create_connection(("127.0.0.1", sidecar.port)) as client,
    ):
        client.settimeout(5)
        client.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nx")
        assert client.recv(1000).startswith(b"HTTP/1.1 200")
        while client.recv(1000):
            pass
