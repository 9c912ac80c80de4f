"""Programs that people have at hand: curl, jq, socat, nc -U, and the examples, against real engines."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from running import PATIENCE, ROOT, Sidecar, UdsEngine, engine_command, environment

ASK = {"id": 1, "op": "generate", "prompt": "Once", "max_tokens": 64}
EXAMPLES = ROOT / "examples"


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def shell(script: str, *tools: str, **variables: object) -> str:
    """What a Bash script prints; it must succeed."""
    for name in tools:
        tool(name)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=environment(**{name: str(value) for name, value in variables.items()}),
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def text(uds_engine: UdsEngine) -> str:
    """What the engine answers to ASK."""
    lines = shell(
        'printf "%s\\n" "$ASK" | socat -t 30 - UNIX-CONNECT:"$AT"', "socat", ASK=json.dumps(ASK), AT=uds_engine.path
    )
    return str(json.loads(lines.splitlines()[-1])["text"])


def test_curl(sidecar: Sidecar, text: str) -> None:
    answer = shell(
        """curl -sS --fail-with-body "$URL/v1/completions" -H 'content-type: application/json' \
            -d '{"prompt": "Once", "max_tokens": 64, "temperature": 0}' | jq -j '.choices[0].text'""",
        "curl",
        "jq",
        URL=sidecar.url,
    )
    assert answer == text


def test_curl_stream(sidecar: Sidecar, text: str) -> None:
    answer = shell(
        """curl -sSN "$URL/v1/completions" -H 'content-type: application/json' \
            -d '{"prompt": "Once", "max_tokens": 64, "temperature": 0, "stream": true}' |
            sed -n 's/^data: //p' | grep -v '^\\[DONE\\]$' | jq -j '.choices[0].text'""",
        "curl",
        "jq",
        URL=sidecar.url,
    )
    assert answer == text


def test_curl_sees_errors_as_status(sidecar: Sidecar) -> None:
    answer = shell(
        """curl -s -o /dev/null -w '%{http_code}' "$URL/v1/completions" -H 'content-type: application/json' \
            -d '{"prompt": "", "stream": true, "temprature": 1}'""",
        "curl",
        URL=sidecar.url,
    )
    assert answer == "400"


@pytest.mark.parametrize("client", ["socat -t 30 - UNIX-CONNECT:$AT", "nc -N -U $AT"])
def test_end_of_input_does_not_cancel(uds_engine: UdsEngine, text: str, client: str) -> None:
    lines = shell(f'printf "%s\\n" "$ASK" | {client}', client.split()[0], ASK=json.dumps(ASK), AT=uds_engine.path)
    events = [json.loads(line) for line in lines.splitlines()]
    assert events[-1]["event"] == "done" and events[-1]["finish_reason"] == "length"
    assert "".join(event["text"] for event in events if event["event"] == "token") == text


def test_jq_and_stdio(tiny: Path, text: str) -> None:
    command = " ".join(f"'{word}'" for word in engine_command("stdio", tiny))
    script = f'printf "%s\\n" "$ASK" | {command} | jq --unbuffered -j \'select(.event == "token").text\''
    assert shell(script, "jq", ASK=json.dumps(ASK)) == text


def example(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, env=environment(), cwd="/", timeout=PATIENCE
    )


@pytest.mark.parametrize(
    "command", [[sys.executable, EXAMPLES / "client.py"], ["node", EXAMPLES / "client.mjs"]], ids=["python", "node"]
)
def test_clients(command: list[Any], uds_engine: UdsEngine, tiny: Path, text: str) -> None:
    tool(str(command[0]))
    for way in (["--socket", uds_engine.path], ["--", *engine_command("stdio", tiny)]):
        done = example(*command, "Once", *way)
        assert (done.returncode, done.stdout) == (0, text)
        assert "[64 tokens, length]" in done.stderr
    done = example(*command, "", "--socket", uds_engine.path)
    assert done.returncode == 1
    assert "engine: invalid_request: " in done.stderr
    done = example(*command, "Once", "--", *engine_command("stdio", "/nonexistent.gguf"))
    assert done.returncode == 1
    assert "nonexistent.gguf" in done.stderr


def test_python_client_cancels(tiny: Path) -> None:
    """Ctrl-C while the answer comes: the engine says how far it came."""
    client = EXAMPLES / "client.py"
    source = client.read_text().replace("max_tokens=64", "max_tokens=4000, ignore_eos=True")
    command = [sys.executable, "-c", source, "Once", "--", *engine_command("stdio", tiny)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(), cwd="/"
    ) as process:
        assert process.stdout and process.stderr
        process.stdout.read(1)
        threading.Thread(target=process.stdout.read).start()
        time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        complaint = process.stderr.read().decode()
        assert process.wait(PATIENCE) == 0
    assert "tokens, cancelled]" in complaint


def test_bash_client(uds_engine: UdsEngine, text: str) -> None:
    tool("socat"), tool("jq")
    done = example(EXAMPLES / "ask.sh", uds_engine.path, "Once")
    assert (done.returncode, done.stdout) == (0, text + "\n"), done.stderr
    done = example(EXAMPLES / "ask.sh", uds_engine.path, "")
    assert done.returncode == 1
    assert done.stderr.startswith("invalid_request: ")
    assert example(EXAMPLES / "ask.sh").returncode == 2
    nobody = example(EXAMPLES / "ask.sh", os.devnull, "Once")
    assert nobody.returncode == 3
    assert "the engine ended" in nobody.stderr
