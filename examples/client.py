#!/usr/bin/env python3
"""A Reflex client on the standard library alone.

    client.py PROMPT -- reflex stdio MODEL      runs the engine itself
    client.py PROMPT --socket PATH              asks one that runs: reflex uds MODEL PATH

Prints the answer as it comes. Ctrl-C ends the answer, not the engine: it is told to cancel, and says how far it came.
"""

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import IO, Any


class Reflex:
    """One conversation: requests go to `writes`, events come from `reads`."""

    def __init__(self, reads: IO[str], writes: IO[str]):
        self.reads = reads
        self.writes = writes
        self.last_id = 0
        for event in self.events():
            if event["event"] == "error":
                raise SystemExit(f"engine: {event['message']}")
            if event["event"] == "ready":
                break

    def events(self) -> Iterator[dict[str, Any]]:
        for line in self.reads:
            if not line.endswith("\n"):  # only a crash leaves half a line
                break
            yield json.loads(line)
        raise SystemExit("engine: it ended")

    def send(self, op: str, **fields: Any) -> int:
        self.last_id += 1
        self.writes.write(json.dumps({"id": self.last_id, "op": op, **fields}) + "\n")
        self.writes.flush()
        return self.last_id

    def generate(self, prompt: str, **fields: Any) -> Iterator[dict[str, Any]]:
        """The events of one answer, up to `done`. The first Ctrl-C cancels it, a second one ends this process."""
        request = self.send("generate", prompt=prompt, **fields)

        def cancel(*_: object) -> None:
            signal.signal(signal.SIGINT, usual)
            self.send("cancel", target=request)

        # A handler, not `except KeyboardInterrupt`: that would be raised in whoever prints our events, too.
        usual = signal.signal(signal.SIGINT, cancel)
        for event in self.events():
            if event.get("id") != request:
                continue  # the answer to a cancel
            yield event
            if event["event"] == "error":
                raise SystemExit(f"engine: {event['code']}: {event['message']}")
            if event["event"] == "done":
                break
        signal.signal(signal.SIGINT, usual)


def connect(arguments: list[str]) -> Reflex:
    if arguments[:1] == ["--socket"] and len(arguments) == 2:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(arguments[1])
        return Reflex(connection.makefile("r", encoding="ascii"), connection.makefile("w", encoding="ascii"))
    if arguments[:1] == ["--"] and len(arguments) > 1:
        # A session of its own: Ctrl-C is for us, and the engine hears of it as a `cancel`.
        engine = subprocess.Popen(
            arguments[1:], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert engine.stdin and engine.stdout
        return Reflex(engine.stdout, engine.stdin)
    raise SystemExit(__doc__)


def main(arguments: list[str]) -> None:
    if len(arguments) < 2:
        raise SystemExit(__doc__)
    for event in connect(arguments[1:]).generate(arguments[0], max_tokens=64):
        if event["event"] == "token":
            print(event["text"], end="", flush=True)
        elif event["event"] == "done":
            usage = event["usage"]
            print(f"\n[{usage['completion_tokens']} tokens, {event['finish_reason']}]", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
