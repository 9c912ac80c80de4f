"""CPU time of the tokenizer: `python bench/tokenizer.py [FILE.gguf ...] [--runs N]`.

Without files, the vocabularies of the tests. Every run is a fresh `python -I -S` with cached pages; the times are those
of the process, best and median. `short`: interpreter, imports, the file's metadata, the tokenizer and a prompt of five
words. Then texts of growing length as the first of a process: by searching the file's lists, and with dictionaries.
"""

import argparse
import json
import lzma
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import ending

ROOT = Path(__file__).parents[1]
FIXTURES = ROOT / "tests" / "fixtures" / "tokenizers"

CHILD = """
import sys
from time import process_time as now
sys.path.insert(0, sys.argv[1])
times = {"start": now()}
from reflex_ipc.tokenizer import Tokenizer
times["import"] = now()
from reflex_ipc.gguf import GGUF
file = GGUF.open(sys.argv[2])
times["open"] = now()
tokenizer = Tokenizer.from_gguf(file)
times["from_gguf"] = now()
text = sys.stdin.read()
read = now()
if sys.argv[3] == "prepare":
    tokenizer.prepare()
n = len(tokenizer.encode(text))
times["encode"] = times["from_gguf"] + now() - read
print([n, times])
"""


def run(path: Path, text: str, mode: str, runs: int) -> tuple[int, dict[str, list[float]]]:
    """(tokens, milliseconds of each phase in each run)."""
    phases: dict[str, list[float]] = {}
    n = 0
    for _ in range(runs):
        command = [sys.executable, "-I", "-S", "-c", CHILD, str(ROOT), str(path), mode]
        out = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
        n, times = json.loads(out.replace("'", '"'))
        last = 0.0
        for phase, time in times.items():
            phases.setdefault(phase, []).append((time - last) * 1e3)
            last = time
        phases.setdefault("all", []).append(last * 1e3)
    return n, phases


def mixed_text(size: int) -> str:
    """About `size` bytes of prose, code, tables and many scripts: this repository's texts and the recorded ones."""
    recorded = json.loads((FIXTURES / "qwen3.vectors.json").read_text())
    sources = sorted(
        [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("reflex_ipc/*.py"), *ROOT.glob("tests/*.py")]
    )
    parts = [" ".join(vector["text"] for vector in recorded if "x" * 9 not in vector["text"])]
    parts += [source.read_text() for source in sources]
    text = "\n".join(part[: size // len(parts) * 2] for part in parts)
    while len(text.encode()) < size:
        text += text
    return text.encode()[:size].decode("utf-8", "ignore")


def best_median(values: list[float]) -> str:
    return f"{min(values):.1f} / {statistics.median(values):.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE.gguf")
    parser.add_argument("--runs", type=int, default=11, help="processes a figure (default %(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        files = options.files
        for packed in [] if files else sorted(FIXTURES.glob("*.xz")):
            files.append(Path(folder) / packed.stem)
            files[-1].write_bytes(lzma.decompress(packed.read_bytes()))
        for path in files:
            print(f"{path.name}: CPU ms, best / median of {options.runs}")
            n, phases = run(path, "The capital of France is", "search", options.runs)
            print(f"  short ({n} tokens): {'; '.join(f'{phase} {best_median(ms)}' for phase, ms in phases.items())}")
            for size in (30, 100, 300, 1000, 3000, 10_000, 100_000):
                text = mixed_text(size)
                ways = {
                    mode: run(path, text, mode, max(3, options.runs // 2))[1]["encode"]
                    for mode in ("search", "prepare")
                }
                print(f"  {size:6} bytes: {'; '.join(f'{mode} {best_median(ms)}' for mode, ms in ways.items())}")


if __name__ == "__main__":
    ending.run(main)
