"""What is begun before the interpreter, and taken over by it: the driver, the header, the copy of the model."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from fakecuda import ROOT, compile_c, library

from reflex_ipc.cuda import LIB
from reflex_ipc.cuda.upload import CHUNK
from reflex_ipc.environment import usable_cpus

KERNELS = Path(LIB) / "sm_90a" / "kernels.txt"
needs_kernels = pytest.mark.skipif(not KERNELS.exists(), reason="the kernels are not built: kernels/build.py all")

SIZE = 37 * (1 << 20) + 4321

# Takes an upload over that was begun early, after a pause, in an order that is not the file's; prints what it saw.
TAKE_OVER = """
import json, os, struct, sys, time
sys.path[:0] = [{root!r}, {tests!r}]
from reflex_ipc.cuda import native
from reflex_ipc.cuda.device import start_driver
native.load.__defaults__ = ({lib!r},)  # the package's own lies elsewhere, if it was built at all
from reflex_ipc.cuda.native import early_times
from reflex_ipc.cuda.upload import Upload
from reflex_ipc.gguf import Shard

path, pause, seed, mode = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
import random
rng = random.Random(seed)
shard = Shard(path)
opening = start_driver(0, {library!r})
assert opening.is_early
class File:
    shards = [shard]
handle = opening.early_upload(File)
if mode == "leave":
    sys.exit(0 if handle else 1)
time.sleep(pause)
upload = Upload(shard.size, early=handle, lib={lib!r})
pieces, at = [], 4096
while at < shard.size:
    length = min(rng.choice([4096, 100_000, 3 << 20, 9 << 20]), shard.size - at)
    pieces.append((shard.fd, at, length, at))
    at += length + rng.choice([0, 0, 64, 200_000])
rng.shuffle(pieces)
groups = [(i, pieces[i::5]) for i in range(5)]
experts = []
if mode == "experts":
    experts = [(3 + i, piece, 4 if piece[2] % 4 == 0 else 1) for i in range(2) for piece in pieces[3 + i :: 5]]
upload.order([(i, [] if mode == "experts" and i >= 3 else group) for i, group in groups], experts)
if mode == "drop":
    upload.close()
    opening.close()
    sys.exit(0)
with opening.wait() as device:
    memory = upload.early_copy(device, shard.size)
    stream = device.stream()
    began_early = memory is not None
    memory = memory or device.allocate(shard.size, "weights")
    upload.start(device, memory.address)
    data = open(path, "rb").read()
    if mode == "experts":
        upload.hold()
        for group in (3, 4):
            upload.ask(group, struct.pack("<4f", 2, 0, 0.5, 0.5), 1, 2)
            upload.wait_group(stream, upload.asked)
            for of, (_, at, size, _), n in experts:
                for start in (at, at + 2 * size // n) if of == group and n > 1 else ():
                    assert stream.read(memory.address + start, size // n) == data[start : start + size // n]
        upload.release()
    for index, group in groups:
        upload.wait_group(stream, index)
        for _, offset, size, place in group:
            assert stream.read(memory.address + place, size) == data[offset : offset + size], (index, offset)
    upload.join()
print(json.dumps([began_early, upload.timings["way"], sorted(early_times(opening.native))]))
"""


@pytest.fixture(scope="module")
def lib(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the native part, for which two processors are not few."""
    directory = tmp_path_factory.mktemp("lib")
    sources = sorted((ROOT / "kernels" / "native").glob("*.[ch]"))
    built = compile_c("early-many", sources, ("-O2", "-fvisibility=hidden", "-DFEW_CORES=0"))
    (directory / "early.so").symlink_to(built)
    return directory


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    path.write_bytes(b"GGUF" + random.Random(3).randbytes(SIZE - 4))
    return path


@pytest.fixture
def take_over(lib: Path, tmp_path: Path):
    """Run the program above; `.report` is what the fake driver has to say about it."""
    (tmp_path / "libcuda.so.1").symlink_to(library())

    def run(model: Path, *arguments: object, guess: Path | None = None, **env: str) -> str:
        program = TAKE_OVER.format(root=str(ROOT), tests=str(ROOT / "tests"), library="libcuda.so.1", lib=str(lib))
        result = subprocess.run(
            [sys.executable, "-c", program, str(model), *map(str, arguments)],
            env={
                "REFLEX_EARLY": "0",
                "REFLEX_MODEL": str(guess or model),
                "LD_PRELOAD": str(lib / "early.so"),
                "LD_LIBRARY_PATH": str(tmp_path),
                "FAKECUDA_REPORT": str(tmp_path / "report"),
                **env,
            },
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (result.returncode, result.stderr) == (0, "")
        report = (tmp_path / "report").read_text()
        run.calls, _, rest = report.partition("[violations]\n")
        violations, _, leaks = rest.partition("[leaks]\n")
        assert violations == ""
        # The early start's own reference to the context is never released: the process ends with it.
        assert [line for line in leaks.splitlines() if not line.startswith("context")] == []
        return result.stdout

    return run


@pytest.mark.parametrize("deferred", [0, 1])
@pytest.mark.parametrize(("context_ms", "pause"), [(0, 0), (0, 0.01), (0, 0.3), (150, 0)])
def test_every_byte_arrives_whenever_the_order_comes(take_over, model: Path, deferred: int, context_ms: int, pause):
    for seed in range(3):
        said = take_over(
            model, pause, seed, "use", FAKECUDA_CONTEXT_MS=str(context_ms), FAKECUDA_DEFERRED=str(deferred)
        )
        assert said == '[true, "early", ["begun", "context", "copying", "driver", "file"]]\n'


def test_what_came_before_the_order_is_not_copied_twice(take_over, model: Path):
    take_over(model, 0.5, 1, "use")
    copied = sum(int(line.split()[-1]) for line in take_over_calls(take_over, "cuMemcpyHtoDAsync_v2"))
    assert copied == SIZE


@pytest.mark.parametrize("deferred", [0, 1])
@pytest.mark.parametrize("pause", [0, 0.003, 0.01, 0.5])
def test_experts_asked_for_whenever_the_order_comes(take_over, model: Path, deferred: int, pause: float):
    for seed in range(3):
        said = take_over(model, pause, seed, "experts", FAKECUDA_DEFERRED=str(deferred))
        assert said.startswith('[true, "early"')
        copied = sum(int(line.split()[-1]) for line in take_over_calls(take_over, "cuMemcpyHtoDAsync_v2"))
        # Slabs know no borders of cells. What comes twice: a cell a reader was about, and what reaches into another.
        readers = min(usable_cpus(), 5)
        assert copied <= SIZE + (3 * readers - 1) * CHUNK
    assert pause < 0.5 or copied == SIZE


def take_over_calls(take_over, name: str) -> list[str]:
    return [line for line in take_over.calls.splitlines() if line.startswith(name + " ")]


@pytest.mark.parametrize("pause", [0, 0.2])
def test_what_nobody_takes_is_given_back(take_over, model: Path, pause: float):
    take_over(model, pause, 1, "drop")
    take_over(model, 0, 1, "leave")


def test_a_wrong_guess_is_given_back(take_over, model: Path, tmp_path: Path):
    other = tmp_path / "other.gguf"
    other.write_bytes(b"GGUF" + bytes(9 << 20))
    assert '[false, "mapped"' in take_over(model, 0, 1, "use", guess=other)
    assert '[false, "mapped"' in take_over(model, 0, 1, "use", guess=tmp_path / "missing.gguf")


def test_a_file_that_does_not_fit_is_left_to_the_program(take_over, model: Path):
    said = take_over(model, 0, 1, "use", FAKECUDA_MEMORY=str(SIZE + (500 << 20)))
    assert '[false, "early"' in said  # its threads copy all the same, to memory that the program asked for


OPEN = """
import sys
sys.path.insert(0, {root!r})
from reflex_ipc.cuda import native
native.load.__defaults__ = ({lib!r},)
from reflex_ipc.cuda import upload
upload.Upload.__init__.__kwdefaults__["lib"] = {lib!r}
upload.usable_cpus = lambda: 8  # the ring, whatever the machine
from reflex_ipc.engine import Engine
from reflex_ipc.errors import ReflexError
try:
    Engine.open(sys.argv[1], backend="cuda").close()
    print("opened")
except ReflexError as error:
    print(type(error).__name__)
"""


@pytest.fixture
def open_engine(lib: Path, tmp_path: Path, fixtures: Path):
    """Open a model whose copy was begun early, in a process of its own; what the fake driver reports is clean."""
    (tmp_path / "libcuda.so.1").symlink_to(library())

    def run(**env: str) -> str:
        model = fixtures / "exact" / "llama-f16.gguf"
        result = subprocess.run(
            [sys.executable, "-c", OPEN.format(root=str(ROOT), lib=str(lib)), str(model)],
            env={
                "REFLEX_EARLY": "0",
                "REFLEX_MODEL": str(model),
                "LD_PRELOAD": str(lib / "early.so"),
                "LD_LIBRARY_PATH": str(tmp_path),
                "FAKECUDA_KERNELS": str(KERNELS),
                "FAKECUDA_REPORT": str(tmp_path / "report"),
                **env,
            },
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (result.returncode, result.stderr) == (0, "")
        run.calls, _, rest = (tmp_path / "report").read_text().partition("[violations]\n")
        violations, _, leaks = rest.partition("[leaks]\n")
        assert violations == ""
        assert [line for line in leaks.splitlines() if not line.startswith("context")] == []
        return result.stdout.strip()

    return run


@needs_kernels
@pytest.mark.parametrize("context_ms", ["0", "300"])
def test_what_fails_behind_the_early_copy_takes_it_along(open_engine, context_ms: str):
    """The threads stop before the memory goes that they copy to."""
    assert open_engine(FAKECUDA_CONTEXT_MS=context_ms) == "opened"
    assert open_engine(FAKECUDA_CONTEXT_MS=context_ms, FAKECUDA_FAIL="cuMemGetInfo_v2:2:999") == "DeviceError"


@needs_kernels
def test_a_start_on_another_device_is_given_back(open_engine):
    assert open_engine(FAKECUDA_DEVICES="4", REFLEX_EARLY="3") == "opened"
    names = [line.split()[0] for line in open_engine.calls.splitlines() if line]
    looks = [i for i, name in enumerate(names) if name == "cuMemGetInfo_v2"]
    # Before the program allocates anything, not when it ends.
    assert len(looks) > 1 and "cuMemFree_v2" in names[looks[0] : looks[1]]


def test_without_a_standard_descriptor_nothing_is_begun(lib: Path, model: Path, tmp_path: Path):
    """The model would be opened in its place, and read as if it were the input."""
    (tmp_path / "libcuda.so.1").symlink_to(library())
    program = "import os, time; time.sleep(0.2); print(*(os.path.realpath(f'/proc/self/fd/{n}') for n in range(8)))"
    env = {"REFLEX_EARLY": "0", "REFLEX_MODEL": str(model), "LD_PRELOAD": str(lib / "early.so")}
    for closed in (False, True):
        result = subprocess.run(
            [sys.executable, "-I", "-S", "-c", program],
            env=env | {"LD_LIBRARY_PATH": str(tmp_path)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            preexec_fn=(lambda: os.close(0)) if closed else None,
        )
        assert (str(model) in result.stdout) != closed


@needs_kernels
def test_failed_openings_leave_no_threads(monkeypatch: pytest.MonkeyPatch, fixtures: Path, tmp_path: Path):
    program = (
        f"import sys, threading; sys.path.insert(0, {str(ROOT)!r})\n"
        "import reflex_ipc.cuda.upload as upload\n"
        "upload.usable_cpus = lambda: 8\n"
        "from reflex_ipc.engine import Engine\n"
        "from reflex_ipc.errors import DeviceError\n"
        "def tasks():\n"
        "    import os\n"
        "    return len(os.listdir('/proc/self/task'))\n"
        "counts = []\n"
        "for _ in range(6):\n"
        "    try:\n"
        "        Engine.open(sys.argv[1], backend='cuda', device=7)\n"
        "    except DeviceError:\n"
        "        counts.append(tasks())\n"
        "assert len(counts) == 6 and counts[-1] <= counts[0], counts\n"
    )
    (tmp_path / "libcuda.so.1").symlink_to(library())
    env = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "FAKECUDA_KERNELS": str(KERNELS)}
    model = fixtures / "exact" / "llama-f16.gguf"
    result = subprocess.run([sys.executable, "-c", program, str(model)], env=env, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
