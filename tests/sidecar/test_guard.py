"""Who may ask, and how: browsers lured by other sites, wrong names, keys, and bodies that are too much."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from running import PATIENCE, Sidecar, engine_command, environment, until

ASK = {"prompt": "Once", "max_tokens": 2}
JSON_TYPE = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def keyed(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    """With a key from a file, one further host and one allowed origin, and bodies of at most 2,000 bytes."""
    folder = tmp_path_factory.mktemp("keyed")
    (folder / "key").write_text("s3cret\n")
    options = ["--key-file", folder / "key", "--allow-host", "Model.Example", "--allow-origin", "https://app.example"]
    with Sidecar(
        folder, *options, "--host", "0.0.0.0", "--body-bytes", 2000, "--", *engine_command("stdio", tiny), ready=False
    ) as it:
        it.url = f"http://127.0.0.1:{it.port}"
        it.wait_ready()
        yield it


def refused(response: httpx.Response, status: int, code: str) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["code"] == code
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("path", ["/", "/readyz", "/metrics", "/v1/models", "/nothing"])
@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "127.0.0.1:x", "[::1", ""]
)
def test_rebound_names_are_refused(child: Sidecar, path: str, host: str) -> None:
    refused(httpx.get(child.url + path, headers={"host": host}), 403, "host_not_allowed")


def test_own_names_are_served(child: Sidecar) -> None:
    for host in ("localhost", f"localhost:{child.port}", "LocalHost:1", "127.0.0.1", "[::1]:8080"):
        assert httpx.get(child.url + "/readyz", headers={"host": host}).status_code == 200


def test_livez_is_for_anyone(keyed: Sidecar) -> None:
    """A probe asks by address; all it can learn is that somebody is there."""
    answer = httpx.get(keyed.url + "/livez", headers={"host": "10.1.2.3:8080", "origin": "null"})
    assert (answer.status_code, answer.text) == (200, "ok\n")


def raw_answer(sidecar: Sidecar, request: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of what comes back, until the sidecar closes the connection."""
    with socket.create_connection(("127.0.0.1", sidecar.port), PATIENCE) as connection:
        connection.settimeout(PATIENCE)
        connection.sendall(request)
        answer = b""
        while data := connection.recv(1 << 16):
            answer += data
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    return int(status.split()[1]), headers, body


@pytest.mark.parametrize(
    "request_",
    [
        b"GARBAGE\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 100_000,
        b"GET /livez HTTP/1.1\r\nHost: localhost\r\nbad header\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1, 2\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",  # TLS
        b"GET /livez HTTP/11.1\r\nHost: localhost\r\n\r\n",
    ],
)
def test_what_is_no_http_is_told_so_in_json(child: Sidecar, request_: bytes) -> None:
    status, headers, body = raw_answer(child, request_)
    assert status == 400 and headers["content-type"] == "application/json" and headers["connection"] == "close"
    assert int(headers["content-length"]) == len(body)
    error = json.loads(body)["error"]
    assert error["code"] == "bad_http" and set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("version", ["9.9", "2.0", "0.9", "3.1"])
@pytest.mark.parametrize("path", ["/livez", "/v1/models", "/", "*"])
def test_another_version_of_http_is_refused(child: Sidecar, version: str, path: str) -> None:
    follows = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
    request = f"GET {path} HTTP/{version}\r\nHost: localhost\r\n\r\n".encode()
    status, headers, body = raw_answer(child, request + follows)
    assert (status, headers["connection"]) == (505, "close")
    assert json.loads(body)["error"]["code"] == "http_version"  # and nothing follows


@pytest.mark.parametrize("version", ["1.0", "1.1", "1.2"])
def test_every_http_1_is_answered(child: Sidecar, version: str) -> None:
    request = f"GET /livez HTTP/{version}\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
    assert raw_answer(child, request)[0] == 200


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        ("http://127.0.0.1:1/v1/models", "127.0.0.1", 200),
        ("HTTP://LocalHost/v1/models/llama-f16", "localhost", 200),
        ("https://localhost/readyz?x=/y", "localhost", 200),
        ("http://localhost", "localhost", 200),
        ("http://evil.example/readyz", "localhost", 403),
        ("http://localhost/readyz", "evil.example", 403),
        ("http://me@localhost/readyz", "localhost", 403),
        ("http:///readyz", "localhost", 403),
        ("http://evil.example/livez", "evil.example", 200),
        ("http://localhost/nothing", "localhost", 404),
        ("ftp://localhost/readyz", "localhost", 404),
    ],
)
def test_the_whole_address_as_target(child: Sidecar, target: str, host: str, status: int) -> None:
    """As clients of a proxy write it; both names have to be served here."""
    request = f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()
    assert raw_answer(child, request)[0] == status


def test_a_models_route_is_counted_under_one_name(child: Sidecar) -> None:
    name = 'reflex_sidecar_requests_total{route="/v1/models/{id}",status="404"}'
    before = child.metric(name)
    for each in ("a", "b/c"):
        httpx.get(f"{child.url}/v1/models/{each}")
    assert child.metric(name) == before + 2


@pytest.mark.parametrize("path", ["/tokenize", "/livez", "/"])
def test_two_lengths_of_one_body(child: Sidecar, path: str) -> None:
    """What one reader takes for a body is another's next request: nothing behind it is looked at."""
    smuggled = b"0\r\n\r\nGET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    both = f"Content-Length: {len(smuggled)}\r\nTransfer-Encoding: chunked\r\n\r\n"
    status, headers, body = raw_answer(child, (head + both).encode() + smuggled)
    assert status == 400 and headers["connection"] == "close"
    assert json.loads(body)["error"]["code"] == "bad_framing"  # and nothing follows


def test_two_hosts(child: Sidecar) -> None:
    with socket.create_connection(("127.0.0.1", child.port), PATIENCE) as connection:
        connection.sendall(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://localhost.evil.example", "http://localhost:1"]
)
def test_other_sites_are_refused(child: Sidecar, origin: str) -> None:
    before = child.metric('reflex_sidecar_finished_total{reason="length"}')
    refused(child.post("/v1/completions", ASK, headers={"origin": origin}), 403, "origin_not_allowed")
    preflight = {"origin": origin, "access-control-request-method": "POST"}
    answer = httpx.options(child.url + "/v1/completions", headers=preflight)
    refused(answer, 403, "origin_not_allowed")
    assert "access-control-allow-origin" not in answer.headers
    assert child.metric('reflex_sidecar_finished_total{reason="length"}') == before


def test_own_page_may_ask(child: Sidecar) -> None:
    answer = child.post("/v1/completions", ASK, headers={"origin": child.url})
    assert answer.status_code == 200
    assert "access-control-allow-origin" not in answer.headers  # CORS is off


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_what_a_form_can_send_is_refused(child: Sidecar, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    refused(
        httpx.post(child.url + "/v1/completions", content=json.dumps(ASK), headers=headers),
        415,
        "unsupported_media_type",
    )


def test_content_type_with_charset(child: Sidecar) -> None:
    headers = {"content-type": "Application/JSON; charset=UTF-8"}
    answer = httpx.post(child.url + "/v1/completions", content=json.dumps(ASK), headers=headers)
    assert answer.status_code == 200


def test_allowed_origin(keyed: Sidecar) -> None:
    origin = {"origin": "https://app.example"}
    preflight = httpx.options(keyed.url + "/v1/completions", headers=origin | {"access-control-request-method": "POST"})
    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-origin"] == "https://app.example"
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    answer = keyed.post("/v1/completions", ASK, headers=origin | {"authorization": "Bearer s3cret"})
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://app.example"
    assert "Origin" in answer.headers["vary"]


def test_allowed_host(keyed: Sidecar) -> None:
    assert httpx.get(keyed.url + "/readyz", headers={"host": "model.example"}).status_code == 200
    refused(httpx.get(keyed.url + "/readyz", headers={"host": "0.0.0.1"}), 403, "host_not_allowed")


@pytest.mark.parametrize(
    "given", [None, "Bearer", "Bearer wrong", "Basic s3cret", "s3cret", "Bearer s3cret2", b"Bearer \xff"]
)
def test_key(keyed: Sidecar, given: Any) -> None:
    headers = {} if given is None else {"authorization": given}
    for method, path in (
        ("GET", "/v1/models"),
        ("GET", "/metrics"),
        ("POST", "/v1/completions"),
        ("POST", "/tokenize"),
    ):
        answer = httpx.request(method, keyed.url + path, headers={**headers, **JSON_TYPE})
        refused(answer, 401, "invalid_api_key")
        assert answer.headers["www-authenticate"] == "Bearer"
    assert httpx.get(keyed.url + "/readyz", headers=headers).json() == {"state": "ready"}
    assert httpx.get(keyed.url + "/livez", headers=headers).status_code == 200


def test_right_key(keyed: Sidecar) -> None:
    headers = {"authorization": "Bearer s3cret"}
    assert keyed.post("/v1/completions", ASK, headers=headers).status_code == 200
    assert httpx.get(keyed.url + "/readyz", headers=headers).json()["model"]["name"] == "llama"


def test_the_engine_does_not_see_the_key(tiny: Path, tmp_path: Path) -> None:
    with Sidecar(tmp_path, "--", *engine_command("stdio", tiny), REFLEX_API_KEY="from-environment") as sidecar:
        assert httpx.get(sidecar.url + "/v1/models").status_code == 401
        given = {"authorization": "Bearer from-environment"}
        assert httpx.get(sidecar.url + "/v1/models", headers=given).status_code == 200
        engine = Path(f"/proc/{sidecar.engine_pid()}/environ").read_bytes()
        assert b"REFLEX_API_KEY" not in engine and b"PATH=" in engine


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--host", "0.0.0.0", "--socket", "x"], "takes a key"),
        (["--host", "::", "--socket", "x"], "takes a key"),
        (["--host", "192.0.2.1", "--socket", "x"], "takes a key"),
        (["--key-file", "/nonexistent", "--socket", "x"], "No such file"),
        (["--key-file", "/dev/null", "--socket", "x"], "has to be a word"),
        ([], "--socket PATH or as a command"),
        (["--socket", "x", "--", "reflex"], "--socket PATH or as a command"),
        (["--"], "--socket PATH or as a command"),
        (["--wait", "nan", "--socket", "x"], "has to be a number from 0"),
        (["--queue", "-1", "--socket", "x"], "has to be a number from 0"),
        (["--ping", "0", "--socket", "x"], "has to be a number from 0.01"),
    ],
)
def test_usage(arguments: list[str], complaint: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "reflex_sidecar", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), cwd=tmp_path, timeout=PATIENCE)
    assert done.returncode == 2
    assert complaint in done.stderr


def test_address_in_use(child: Sidecar, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "reflex_sidecar", "--port", str(child.port), "--socket", "x"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), cwd=tmp_path, timeout=PATIENCE)
    assert done.returncode == 1
    assert f"port {child.port}" in done.stderr


def test_body_limit(keyed: Sidecar) -> None:
    def ask(length: int, **more: Any) -> httpx.Response:
        body = json.dumps({"prompt": "x", "max_tokens": 1, "user": ""})
        content = body[:-2] + "x" * (length - len(body)) + body[-2:]
        if more.pop("chunked", False):
            content = iter([content[:100].encode(), content[100:].encode()])  # type: ignore[assignment]
        headers = {"authorization": "Bearer s3cret", **JSON_TYPE}
        return httpx.post(keyed.url + "/v1/completions", content=content, headers=headers)

    assert ask(2000).status_code == 200
    assert ask(2000, chunked=True).status_code == 200
    refused(ask(2001), 413, "request_too_large")
    refused(ask(2001, chunked=True), 413, "request_too_large")


def test_a_huge_body_is_not_read(child: Sidecar) -> None:
    """A gigabyte is declared and refused before any of it has come."""
    with socket.create_connection(("127.0.0.1", child.port), PATIENCE) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
        connection.sendall(b"Content-Length: 1073741824\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 413")


def test_an_endless_body_is_cut(child: Sidecar) -> None:
    rss = resident(child.popen.pid)
    with socket.create_connection(("127.0.0.1", child.port), PATIENCE) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
        connection.sendall(b"Transfer-Encoding: chunked\r\n\r\n")
        sent = 0
        chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
        with pytest.raises(OSError):
            while sent < 100 << 20:
                connection.sendall(chunk)
                sent += 65536
    assert sent < 32 << 20  # 4 MiB and what the buffers of both sides held
    assert resident(child.popen.pid) - rss < 50_000


def test_a_slow_body_holds_up_nobody(child: Sidecar) -> None:
    with socket.create_connection(("127.0.0.1", child.port), PATIENCE) as slow:
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
        slow.sendall(b"Content-Length: 1000\r\n\r\n{")
        time.sleep(0.2)
        assert child.metric("reflex_sidecar_running") == 0
        assert child.post("/v1/completions", ASK).status_code == 200


def test_line_longer_than_the_engine_takes(tiny: Path, tmp_path: Path) -> None:
    with Sidecar(tmp_path, "--", *engine_command("stdio", tiny, "--limit-line", 300)) as sidecar:
        refused(sidecar.post("/v1/completions", {"prompt": "x" * 300}), 413, "request_too_large")
        assert sidecar.post("/v1/completions", ASK).status_code == 200
        assert sidecar.metric("reflex_sidecar_engine_restarts_total") == 0


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/x", 404), ("GET", "/v1/completions", 405)])
def test_no_such_route(child: Sidecar, method: str, path: str, status: int) -> None:
    answer = httpx.request(method, child.url + path)
    assert answer.status_code == status
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_nothing_of_a_request_is_logged(child: Sidecar) -> None:
    secret = "xyzzy-4711"
    child.post("/v1/completions", {"prompt": secret, "max_tokens": 1})
    child.post("/v1/completions", {"prompt": secret, secret: 1})
    child.post("/v1/completions", {"prompt": "x", "seed": secret})
    child.post("/v1/completions?" + secret, {"prompt": "x"})
    child.post("/" + secret, {})
    httpx.post(child.url + "/v1/completions", content=b"{" + secret.encode(), headers=JSON_TYPE)
    answer = child.post("/v1/completions", {"prompt": "Once", "max_tokens": 8, "temperature": 0}).json()
    until(lambda: "POST other 404" in child.text())
    assert secret not in child.text()
    assert answer["choices"][0]["text"] not in child.text()
    assert secret not in httpx.get(child.url + "/metrics").text


def resident(pid: int) -> int:
    """Kilobytes of a process's own memory."""
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("RssAnon:")]
    return int(line.split()[1])


def test_idle_connections_do_not_shut_out_livez(child: Sidecar) -> None:
    """More connections than a usual limit, that send nothing: the probe is answered all the same."""
    idle = []
    try:
        for _ in range(600):
            idle.append(socket.create_connection(("127.0.0.1", child.port), timeout=PATIENCE))
        assert httpx.get(child.url + "/livez", timeout=PATIENCE).status_code == 200
    finally:
        for connection in idle:
            connection.close()
