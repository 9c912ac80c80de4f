"""A file in parts and whole again, as commands."""

import random
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def parts(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "parts.py"), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True)


def test_there_and_back(tmp_path: Path):
    data = random.Random(1).randbytes((2 << 20) + 77)
    (tmp_path / "a").write_bytes(data)
    folders = parts("split", tmp_path / "a", tmp_path / "parts", "--mib", 1).stdout.split()
    assert [Path(folder).name for folder in folders] == ["part-0", "part-1", "part-2"]
    out = tmp_path / "there"
    assert parts("join", folders[2], out).stdout.endswith("2 parts are missing\n")
    assert parts("join", folders[0], out).stdout.endswith("1 parts are missing\n")
    assert not out.exists()
    assert parts("join", folders[1], out).stdout.endswith("whole, sha256 as it was\n")
    assert out.read_bytes() == data and not Path(f"{out}.parts").exists()


def test_what_is_not_the_file_is_refused(tmp_path: Path):
    (tmp_path / "a").write_bytes(bytes(3 << 20))
    (tmp_path / "b").write_bytes(b"x" * (3 << 20))
    a = parts("split", tmp_path / "a", tmp_path / "pa", "--mib", 2).stdout.split()
    b = parts("split", tmp_path / "b", tmp_path / "pb", "--mib", 2).stdout.split()
    out = tmp_path / "there"
    assert parts("join", a[0], out).returncode == 0
    other = parts("join", b[1], out)
    assert other.returncode == 1 and "another file" in other.stderr
    (Path(a[1]) / "data").write_bytes(b"damaged")
    damaged = parts("join", a[1], out)
    assert damaged.returncode == 1 and "sha256" in damaged.stderr and not out.exists()
