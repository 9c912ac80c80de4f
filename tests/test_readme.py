"""The README's command blocks do what they say.

In a `console` block a line after `$ ` is a command and the lines below it are its whole output; without lines, it only
has to succeed. Blocks marked `console gpu` need a device. Python blocks are run as they are.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"^```([\w ]+)\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
PYTHON = [text for kind, text in BLOCKS if kind == "python"]


def commands(wanted: str) -> list[tuple[str, str]]:
    found = []
    for kind, text in BLOCKS:
        if kind == wanted:
            for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
                command, _, output = part.partition("\n")
                found.append((command, output))
    return found


@pytest.fixture
def path_with_reflex(tmp_path: Path) -> dict[str, str]:
    """An environment in which `reflex` runs this checkout."""
    script = tmp_path / "reflex"
    script.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -m reflex_ipc "$@"\n')
    script.chmod(0o755)
    return {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}


@pytest.mark.model
@pytest.mark.parametrize(("command", "output"), commands("console"))
def test_console_block(command: str, output: str, smollm2: Path, path_with_reflex: dict[str, str]) -> None:
    result = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        env=path_with_reflex,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    # `head` may end its writer early, by the signal a shell counts as 141.
    assert result.returncode in ((0, 141) if "| head" in command else (0,)), result.stderr
    assert result.stdout
    if output:
        assert result.stdout.rstrip("\n") == output.rstrip("\n")


@pytest.mark.gpu
@pytest.mark.parametrize(("command", "output"), commands("console gpu"))
def test_console_block_for_a_device(command: str, output: str, path_with_reflex: dict[str, str]) -> None:
    if not any(os.path.exists(node) for node in ("/dev/nvidiactl", "/dev/dxg")):
        pytest.skip("there is no NVIDIA device here")
    test_console_block(command, output, Path(), path_with_reflex)


@pytest.mark.model
@pytest.mark.parametrize("text", PYTHON)
def test_python_block(text: str, smollm2: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "Paris" in result.stdout
