"""An engine that does what a real one never should: `fake_engine.py SCENARIO`, on stdin and stdout."""

import json
import os
import sys
import time
from typing import Any


def say(**event: Any) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def main(scenario: str) -> None:
    if scenario == "mute":
        time.sleep(1000)
    if scenario == "refuses":
        say(event="hello", protocol=1, ops=[], limits={})
        say(id=None, event="error", code="model_file", message="x.gguf: no such file", fatal=True, exit_code=3)
        sys.exit(3)
    if scenario == "noise":
        print("Loading the model, please wait", flush=True)
    say(
        event="hello",
        protocol=2 if scenario == "newer" else 1,
        ops=["generate", "cancel"],
        limits={"line_bytes": 4 << 20},
        more=[1],
    )
    say(event="something new", what={})
    say(event="ready", model={"file": "fake.gguf", "n_ctx": 100}, timings={"total_ms": 1.0})
    for line in sys.stdin:
        request = json.loads(line)
        id = request["id"]
        if request["op"] == "cancel":
            if scenario != "deaf":
                say(id=id, event="result", target=request["target"], found="unknown")
            continue
        say(id=id, event="started", prompt_tokens=1)
        if scenario == "markup":
            say(id=id, event="token", index=0, token=1, text=request["prompt"], logprob=-1.0)
        say(id="another", event="token", index=0, token=1, text="not yours", logprob=-1.0)
        say(id=id, event="news", text="of a later version")
        say(id=id, event="token", index=0, token=1, text="a", logprob=-1.0)
        if scenario == "deaf":
            continue
        if scenario == "half line":
            sys.stdout.write('{"id": "r1", "event": "tok')
            sys.stdout.flush()
            os._exit(1)
        if scenario == "garbage":
            print("Segmentation fault (not really)", flush=True)
            continue
        usage = {"prompt_tokens": 1, "reused_tokens": 0, "completion_tokens": 1}
        say(id=id, event="done", finish_reason="boredom", text="a", usage=usage, timings={}, mood="good")


if __name__ == "__main__":
    main(sys.argv[1])
