"""What is said about a start: phases, traces and pictures, of real runs; the device is a fake that keeps time."""

import importlib
import json
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path

import pytest
from fakecuda import Fake, fail_each_call

from reflex_ipc import archs, stamps, svg, waterfall
from reflex_ipc.cuda import launch
from reflex_ipc.cuda.device import start_driver
from reflex_ipc.cuda.executor import CudaExecutor
from reflex_ipc.cuda.weights import Weights
from reflex_ipc.engine import Engine
from reflex_ipc.errors import InputOutputError, InvalidRequestError
from reflex_ipc.gguf import GGUF
from reflex_ipc.ops import scope
from reflex_ipc.plan import Step
from reflex_ipc.timings import OUT
from reflex_ipc.trace import Trace

pytest_plugins = ["fakecuda.fixtures"]

ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, "-m", "reflex_ipc"]
KERNELS = Path(launch.LIB) / "sm_90a" / "kernels.txt"
MAIN = ["interpreter", "arguments", "imports", "driver start", "header", "vocabulary", "plan", "tokens"]
MAIN += ["numpy", "weights", "executor", "reserve"]

needs_kernels = pytest.mark.skipif(not KERNELS.exists(), reason="the kernels are not built: kernels/build.py all")


@pytest.fixture
def tiny(fixtures: Path) -> Path:
    return fixtures / "exact" / "qwen3-f16.gguf"


def reflex(*arguments: object, code: int = 0, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)],
        input=stdin, capture_output=True, text=True, timeout=60, cwd=ROOT, check=False, env={**os.environ, **env},
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


def events_of(path: Path) -> list[dict]:
    """The events of a file, after everything that the Chrome trace format asks of them."""
    trace = json.loads(path.read_text("ascii"))
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"} and trace["displayTimeUnit"] == "ms"
    events = trace["traceEvents"]
    named = {event["tid"] for event in events if event["name"] == "thread_name"}
    assert sum(event["name"] == "process_name" for event in events) == 1
    assert len({event["pid"] for event in events}) == 1
    times = [event["ts"] for event in events if event["ph"] != "M"]
    assert times == sorted(times)
    for event in events:
        assert isinstance(event["name"], str) and isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] > 0 and event["tid"] in named
        elif event["ph"] == "i":
            assert event["s"] in ("g", "p", "t") and event["tid"] in named
        else:
            assert event["ph"] == "M" and isinstance(event["args"], dict)
            assert event["name"] in ("process_name", "thread_name", "thread_sort_index")
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    for tid in tracks:  # the spans of a thread lie behind each other or within each other
        open_ends: list[float] = []
        for event in (e for e in events if e["ph"] == "X" and e["tid"] == tid):
            while open_ends and open_ends[-1] <= event["ts"] + 0.002:  # ends are sums of rounded numbers
                open_ends.pop()
            end = event["ts"] + event["dur"]
            assert not open_ends or end <= open_ends[-1] + 0.002, event
            open_ends.append(end)
    return [event | {"track": tracks[event["tid"]]} for event in events if event["ph"] != "M"]


# On the CPU


def test_a_run_is_traced_from_its_launch_to_its_last_token(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    plain = reflex("run", tiny, "Hello there", "-n", "3", "--backend", "cpu")
    before = time.monotonic_ns()
    traced = reflex(
        "run", tiny, "Hello there", "-n", "3", "--backend", "cpu", "--trace", file, REFLEX_LAUNCHED=str(before)
    )
    took = (time.monotonic_ns() - before) / 1e3
    assert (traced.stdout, traced.stderr) == (plain.stdout, "")
    events = events_of(file)
    assert all(event["ts"] + event.get("dur", 0) <= took for event in events)
    phases = [event for event in events if event["track"] == "main" and event["ph"] == "X"]
    assert [event["name"] for event in phases] == [*MAIN, "prompt", "first token", "flush", "answer"]
    assert phases[0]["ts"] == 0
    for one, two in pairwise(phases):
        assert abs(one["ts"] + one["dur"] - two["ts"]) < 0.002
    (out,) = (event for event in events if event["ph"] == "i")
    assert out["name"] == "first output" and abs(out["ts"] - phases[-1]["ts"]) < 0.002

    with GGUF.open(tiny) as gguf:
        plan = archs.build(gguf)
    ops = [event for event in events if event["track"] == "ops"]
    # The prompt, and a step behind each token but the last.
    assert [event["name"] for event in ops] == [op.name for op in plan.ops] * 3
    assert [event["args"]["op"] for event in ops] == [type(op).__name__ for op in plan.ops] * 3
    layers = [event for event in events if event["track"] == "compute"]
    assert [event["name"] for event in layers] == [*dict.fromkeys(scope(op.name) for op in plan.ops)] * 3
    for layer in layers:
        inside = [
            op for op in ops if layer["ts"] <= op["ts"] and op["ts"] + op["dur"] <= layer["ts"] + layer["dur"] + 0.002
        ]
        assert {scope(op["name"]) for op in inside} == {layer["name"]}
    prompt = next(event for event in phases if event["name"] == "prompt")
    first = layers[: len(layers) // 3]
    assert prompt["ts"] <= first[0]["ts"] and first[-1]["ts"] + first[-1]["dur"] <= prompt["ts"] + prompt["dur"]


def test_scoring_is_traced(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    arguments = ["system1", tiny, "Hello", "-a", " there", "-a", " you", "--backend", "cpu"]
    done = reflex(*arguments, "--trace", file, "--timings", "json")
    assert done.stdout == reflex(*arguments).stdout
    names = [event["name"] for event in events_of(file) if event["track"] == "main" and event["ph"] == "X"]
    assert names == [*MAIN[:-1], "reserve", "scores", "flush"]
    said = json.loads(done.stderr)
    assert said["timings"]["score_ms"] > 0 and said["usage"]["prompt_tokens"] > 0


def test_timings_as_json(tiny: Path) -> None:
    done = reflex("run", tiny, "-n", "2", "--backend", "cpu", "--timings", "json", "Hello there")
    assert done.stderr.count("\n") == 1
    said = json.loads(done.stderr)
    assert list(said) == ["launch", "phases", "timings", "backend", "usage"]
    assert said["launch"]["source"] == "/proc/self/stat" and 0 < said["launch"]["within_ms"] <= 5
    assert [phase["name"] for phase in said["phases"]] == [*MAIN, "prompt", "first token", "flush", "answer"]
    assert all(0 <= phase["start_ms"] <= phase["end_ms"] for phase in said["phases"])
    timings = said["timings"]
    ends = {phase["name"]: phase["end_ms"] for phase in said["phases"]}
    # Each is the distance of two stamps, not a second measurement of about the same.
    for name, first, last in (
        ("header_ms", "imports", "vocabulary"),
        ("plan_ms", "vocabulary", "plan"),
        ("executor_ms", "tokens", "executor"),
    ):
        within = 1.0 if first == "tokens" else 0.0002  # between them `run` looks at the prompt's ids
        assert timings[name] == pytest.approx(ends[last] - ends[first], abs=within)
    assert timings["total_ms"] - timings["prompt_ms"] == pytest.approx(ends["answer"] - ends["prompt"], abs=0.0002)
    assert timings["first_token_ms"] - timings["prompt_ms"] == pytest.approx(
        ends["first token"] - ends["prompt"], abs=0.0002
    )
    assert {"header_ms", "plan_ms", "executor_ms", "prompt_ms", "first_token_ms", "total_ms", "run_ms"} <= set(timings)
    flush = next(phase for phase in said["phases"] if phase["name"] == "flush")
    assert timings["launch_to_output_ms"] == pytest.approx(flush["end_ms"], abs=0.001)
    assert said["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("timings", [["--timings"], ["--timings", "text"], ["--timings=text"]])
def test_timings_for_people(tiny: Path, timings: list[str]) -> None:
    """A prompt may follow the bare option, as it always could."""
    done = reflex("run", tiny, "-n", "1", "--backend", "cpu", *timings, "Hello there")
    lines = [line.removeprefix("reflex: ").split("  ")[0] for line in done.stderr.splitlines()]
    assert lines[1 : 1 + len(MAIN)] == MAIN
    assert done.stdout


def test_a_prompt_option_behind_timings(tiny: Path) -> None:
    plain = reflex("run", tiny, "-n", "2", "--backend", "cpu", "-p", "--hello")
    assert reflex("run", tiny, "-n", "2", "--backend", "cpu", "--timings", "-p", "--hello").stdout == plain.stdout
    assert "'xml'" in reflex("run", tiny, "Hello", "--timings=xml", code=2).stderr


@pytest.mark.parametrize(
    ("target", "reason"), [("missing/trace.json", "No such file"), (".", "directory"), ("/dev/full", "space")]
)
def test_a_trace_that_cannot_be_written_costs_no_answer(tiny: Path, tmp_path: Path, target: str, reason: str) -> None:
    plain = reflex("run", tiny, "Hello", "-n", "3", "--backend", "cpu")
    done = reflex("run", tiny, "Hello", "-n", "3", "--backend", "cpu", "--trace", tmp_path / target, code=11)
    assert done.stdout == plain.stdout
    assert done.stderr.startswith("reflex: writing the trace to ") and reason in done.stderr
    with pytest.raises(InputOutputError):
        Trace().write(str(tmp_path / target))


def test_what_ends_a_run_early_leaves_its_trace(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    done = reflex(
        "run", tiny, "Hello", "-n", "100000", "--deadline", "1", "--backend", "cpu", "--trace", file, code=124
    )
    assert "deadline" in done.stderr
    assert [event["name"] for event in events_of(file)][:2] == ["interpreter", "arguments"]
    # What ended the run is said last, and is what the exit code is of.
    failed = reflex("run", tmp_path / "no.gguf", "Hello", "--backend", "cpu", "--trace", "/dev/full", code=3)
    assert "writing the trace" in failed.stderr.splitlines()[0] and "no.gguf" in failed.stderr.splitlines()[-1]


def test_a_loaded_model_is_traced_over_all_its_requests(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    requests = "".join(
        json.dumps({"id": i, "op": "generate", "prompt": "Hello", "max_tokens": 2}) + "\n" for i in (1, 2)
    )
    done = reflex("stdio", tiny, "--backend", "cpu", "--trace", file, stdin=requests)
    said = [json.loads(line) for line in done.stdout.splitlines()]
    ready = next(event for event in said if event["event"] == "ready")
    assert ready["timings"]["launch_ms"] > ready["timings"]["executor_ms"] > 0
    assert sum(event["event"] == "done" for event in said) == 2
    layers = [event["name"] for event in events_of(file) if event["track"] == "compute"]
    assert layers.count("blk.0") == 4


def test_a_trace_from_python(tiny: Path, tmp_path: Path) -> None:
    trace = Trace()
    with Engine.open(tiny, backend="cpu", trace=trace) as engine:
        list(engine.generate("Hello", max_tokens=1))
    trace.write(str(tmp_path / "trace.json"))
    events = events_of(tmp_path / "trace.json")
    assert events[0]["ts"] == 0 and {event["track"] for event in events} == {"compute", "ops"}
    assert json.loads((tmp_path / "trace.json").read_text())["otherData"] == {"model": tiny.name, "backend": "cpu"}


def test_a_trace_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reflex_ipc.trace.MOST_SPANS", 3)
    trace = Trace()
    for i in range(5):
        trace.add("main", str(i), i, i + 1)
    content = trace.chrome()
    assert content["otherData"] == {"dropped_spans": 2}
    assert [event["name"] for event in content["traceEvents"] if event["ph"] == "X"] == ["0", "1", "2"]


# The launch

SHOW = """
from reflex_ipc.stamps import stamp
stamp('interpreter')
from reflex_ipc.launched import launch
print(*launch())
"""


def launched(**env: str) -> tuple[int, int, str]:
    """What a process says of its own launch; it lies between the clock's readings around it, as far as it claims."""
    environment = {name: value for name, value in os.environ.items() if name != "REFLEX_LAUNCHED"}
    before = time.monotonic_ns()
    with subprocess.Popen(
        [sys.executable, "-c", SHOW], stdout=subprocess.PIPE, env=environment | env, cwd=ROOT
    ) as child:
        after = time.monotonic_ns()
        assert child.stdout is not None
        at, within, source = child.stdout.read().decode().split()
    if source == "/proc/self/stat":
        assert before - int(within) <= int(at) <= after + int(within)
    return int(at), int(within), source


def test_the_kernel_knows_the_launch_to_a_tick() -> None:
    for _ in range(5):
        _, within, source = launched()
        assert source == "/proc/self/stat" and 0 < within <= 5_000_000


def test_who_launches_knows_it_better() -> None:
    said = time.monotonic_ns()
    assert launched(REFLEX_LAUNCHED=str(said)) == (said, 0, "REFLEX_LAUNCHED")


@pytest.mark.parametrize("said", ["", "soon", "-5", "1.5", "9" * 30, "9" * 19, "1"])
def test_what_can_be_no_launch_is_not_believed(said: str) -> None:
    assert launched(REFLEX_LAUNCHED=said)[2] == "/proc/self/stat"


def test_stamps(monkeypatch: pytest.MonkeyPatch) -> None:
    from reflex_ipc.launched import Launch
    from reflex_ipc.timings import Phase, phases

    monkeypatch.setattr(stamps, "moments", {})
    stamps.stamp("one", at=10)
    stamps.stamp("two", at=15)
    stamps.stamp("begin", at=5, track="there")
    stamps.stamp("work", at=9, track="there")
    stamps.stamp("part", 11, at=12)
    stamps.stamp("one", at=20)
    assert phases(Launch(4, 0, "")) == [
        Phase("main", "two", 4, 15),
        Phase("there", "work", 5, 9),
        Phase("main", "part", 11, 12),
        Phase("main", "one", 15, 20),
    ]
    assert stamps.lasted("part", "one", "none") == {"part_ms": 1e-6}


def test_nothing_of_it_is_imported_unless_asked_for(tiny: Path) -> None:
    program = (
        "import sys; from reflex_ipc.cli import main\n"
        f"main(['run', {str(tiny)!r}, 'Hello', '-n', '1', '--backend', 'cpu'])\n"
        "names = ('trace', 'reference.tracing', 'cuda.tracing', 'timings', 'timeline', 'launched', 'svg')\n"
        "print('', *(name for name in names if 'reflex_ipc.' + name in sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stderr == "\n"


# On a device


@pytest.fixture
def model(tiny: Path):
    with GGUF.open(tiny) as gguf:
        yield gguf


def opened(fake: Fake, model: GGUF, trace: Trace | None) -> CudaExecutor:
    return CudaExecutor(model, archs.build(model), 64, opening=start_driver(0, fake.path), trace=trace)


def use(executor: CudaExecutor) -> None:
    executor.reserve(16)
    executor.forward(Step.text(range(5), 0, [4]))
    executor.forward(Step.text([1], 5, [0]))


@pytest.fixture
def kernels(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.c.fake_kernels(str(KERNELS).encode())
    monkeypatch.setattr("reflex_ipc.cuda.upload.usable_cpus", lambda: 4)  # the ring, whatever the machine


@needs_kernels
@pytest.mark.parametrize("deferred", [0, 1])
def test_arrivals_and_layers_on_the_devices_clock(
    fake: Fake, kernels: None, model: GGUF, tmp_path: Path, deferred: int
) -> None:
    fake.set(deferred=deferred)
    trace = Trace()
    before = time.monotonic_ns()
    executor = opened(fake, model, trace)
    use(executor)
    executor.close()
    after = time.monotonic_ns()
    plan = executor.plan
    weights = Weights(model, plan)
    copies = [span for span in trace.spans if span.track == "copy"]
    layers = [span for span in trace.spans if span.track == "compute"]
    assert [span.args["bytes"] for span in copies] == [sum(p[2] for p in pieces) for _, pieces in weights.groups]
    blocks = [f"blk.{i}" for i in range(plan.n_layer)]
    assert [span.name for span in copies if span.name.startswith("blk.")] == blocks
    assert [span.name for span in layers if span.name.startswith("blk.")] == blocks * 2
    slack = round(trace.about["device_clock_within_ms"] * 1e6) + 1000  # a float of milliseconds
    for spans in (copies, layers):
        for one, two in pairwise(spans):
            assert one.start <= one.end <= two.start
        assert before - slack <= spans[0].start and spans[-1].end <= after + slack
    trace.write(str(tmp_path / "trace.json"))
    events_of(tmp_path / "trace.json")
    assert trace.about["upload"]["bytes"] >= sum(weights.sizes)
    driver = {name: stamps.moments[name] for name in ("driver", "context")}
    assert all(track == "driver" and before <= began <= at <= after for began, at, track in driver.values())


@needs_kernels
def test_a_traced_step_computes_the_same_launches(fake: Fake, kernels: None, model: GGUF) -> None:
    logs = []
    for trace in (None, Trace()):
        executor = opened(fake, model, trace)
        use(executor)
        executor.close()
        logs.append([line for line in fake.log if line.startswith("cuLaunchKernelEx")])
        events = sum(line.startswith("cuEventElapsedTime") for line in fake.log)
        assert events == 0 if trace is None else events > 10
        fake.reset()
    assert [line.split()[1] for line in logs[0]] == [line.split()[1] for line in logs[1]]


@needs_kernels
def test_every_driver_call_failing_while_traced_is_a_typed_error(fake: Fake, kernels: None, model: GGUF) -> None:
    fail_each_call(fake, lambda: opened(fake, model, Trace()), use)


@needs_kernels
def test_marks_on_a_device_are_bounded(fake: Fake, kernels: None, model: GGUF, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reflex_ipc.cuda.tracing.MOST_MARKS", 4)
    trace = Trace()
    executor = opened(fake, model, trace)
    use(executor)
    executor.close()
    assert [span.name for span in trace.spans if span.track == "compute"] == ["embd", "blk.0", "blk.1", "blk.2"]
    assert trace.dropped > 0


@needs_kernels
def test_a_device_that_is_lost_says_so_in_the_trace(fake: Fake, kernels: None, model: GGUF) -> None:
    trace = Trace()
    executor = opened(fake, model, trace)
    use(executor)
    fake.fail("cuEventElapsedTime", code=700)
    executor.close()
    assert "CUDA_ERROR" in trace.about["device_error"]


@needs_kernels
def test_the_start_before_the_interpreter_is_traced(fake: Fake, tiny: Path, tmp_path: Path) -> None:
    """The real command as the launcher starts it. The fake computes nothing, so that the answer is refused."""
    (tmp_path / "libcuda.so.1").symlink_to(fake.path)
    early = tmp_path / "early.so"  # the loader splits its list at spaces, which the checkout's path may have
    early.symlink_to(Path(launch.LIB) / "early.so")
    env = {"LD_LIBRARY_PATH": str(tmp_path), "LD_PRELOAD": str(early), "REFLEX_EARLY": "0"}
    env |= {
        "FAKECUDA_KERNELS": str(KERNELS),
        "FAKECUDA_INIT_MS": "30",
        "FAKECUDA_CONTEXT_MS": "20",
        "REFLEX_MODEL": str(tiny),
        # Else the launch is known to a tick, which may lie behind the driver's start and shorten it.
        "REFLEX_LAUNCHED": str(time.monotonic_ns()),
    }
    file = tmp_path / "trace.json"
    reflex("run", tiny, "Hello", "--backend", "cuda", "--trace", file, code=1, **env)
    events = events_of(file)
    spans = {event["name"]: event for event in events if event["ph"] == "X"}
    driver, context = spans["early driver"], spans["early context"]
    assert driver["track"] == context["track"] == "early"
    assert driver["dur"] >= 30_000 and context["dur"] >= 20_000
    assert driver["ts"] < spans["interpreter"]["ts"] + spans["interpreter"]["dur"]
    assert {"driver", "context", "layout", "device wait", "memory", "upload", "prompt", "blk.0"} <= set(spans)
    assert next(event for event in events if event["name"] == "early file")["track"] == "early"
    assert any(name.startswith("module ") for name in spans)


# The picture


def test_a_start_becomes_a_waterfall(tiny: Path, tmp_path: Path) -> None:
    picture, file = tmp_path / "timeline.svg", tmp_path / "trace.json"
    done = reflex("bench", "timeline", tiny, "Hello there", "--backend", "cpu", "-o", picture)
    root = ElementTree.fromstring(picture.read_text())
    space = "{http://www.w3.org/2000/svg}"
    texts = [element.text for element in root.iter(f"{space}text")]
    assert "From launch to first output, qwen3-f16.gguf, cpu" in texts
    assert {"interpreter", "header", "weights", "prompt", "blk.0", "blk.2", "is computed"} <= set(texts)
    out = float(done.stdout.splitlines()[-1].split()[-1])
    assert any(text and text.startswith("first output: ") for text in texts) and out > 0
    width = float(root.get("width", "0"))
    for box in root.iter(f"{space}rect"):
        left = float(box.get("x", ""))
        assert left >= 0 and left + float(box.get("width", "")) <= width

    reflex("run", tiny, "Hello there", "-n", "1", "--backend", "cpu", "--trace", file)
    reflex("bench", "timeline", file, "-o", picture)
    again = {element.text for element in ElementTree.fromstring(picture.read_text()).iter(f"{space}text")}
    assert {"interpreter", "header", "weights", "prompt", "blk.0"} <= again


def test_what_bench_timeline_is_refused(tiny: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    for content in (
        "",
        "[]",
        "{}",
        '{"traceEvents": 5}',
        '{"traceEvents": [{"ph": "X"}]}',
        '{"traceEvents": []}',
        "[" * 9999,
    ):
        bad.write_text(content)
        assert "trace" in reflex("bench", "timeline", bad, code=2).stderr
    assert "takes no prompt" in reflex("bench", "timeline", bad, "Hello", code=2).stderr
    reflex("bench", "timeline", tmp_path / "none.json", code=11)
    assert "no.gguf" in reflex("bench", "timeline", tmp_path / "no.gguf", "Hello", code=3).stderr
    reflex("bench", "timeline", tiny, "Hello", "--backend", "cpu", "-o", "/dev/full", code=11)
    reflex("bench", "something", tiny, "Hello", code=2)


def test_a_picture_of_a_device_shows_both_streams() -> None:
    trace = Trace()
    trace.add("main", "header", 0, 2_000_000)
    trace.add("driver", "context", 1_000_000, 80_000_000)
    trace.add("main", "module norm", 81_000_000, 82_000_000)
    trace.add("main", "module rope", 82_000_000, 84_000_000)
    for i in range(3):
        trace.add("copy", f"blk.{i}", (80 + i) * 10**6, (81 + i) * 10**6)
        trace.add("compute", f"blk.{i}", (84 + i) * 10**6, (85 + i) * 10**6)
    trace.add("main", OUT, 90_000_000, 90_000_000)
    trace.add("compute", "token", 91_000_000, 95_000_000)
    picture = waterfall.draw(trace.chrome(0), "A <start>")
    texts = [e.text for e in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")]
    assert {"A <start>", "driver: context", "modules", "arrives", "is computed", "first output: 90.0 ms"} <= set(texts)
    assert "3.0" in texts and "token" not in texts  # both modules together; nothing behind the first token
    with pytest.raises(InvalidRequestError, match="no spans"):
        waterfall.draw(Trace().chrome(), "")


def test_the_instrument_takes_traces_apart(tiny: Path, tmp_path: Path) -> None:
    script = ROOT / "bench" / "timeline.py"
    done = subprocess.run(
        [sys.executable, script, tiny, "--out", tmp_path / "timeline.json", "--backend", "cpu", "--runs", "1"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "0 disagreements in 1 traces"
    result = json.loads((tmp_path / "timeline.json").read_text())
    assert 0 < result["phases_ms"]["numpy"] < result["first_output_ms"][0] < result["traced_ms"][0]
    (tmp_path / "trace.json").write_text(json.dumps(result["trace"]))
    events_of(tmp_path / "trace.json")
    report = [sys.executable, ROOT / "bench" / "report.py", tmp_path / "timeline.json", "--out", tmp_path / "page.md"]
    subprocess.run(report, check=True, timeout=60)
    ElementTree.parse(next((tmp_path / "page").glob("timeline-*.svg")))


def test_the_instrument_sees_what_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    timeline = importlib.import_module("timeline")
    bar = waterfall.Bar
    good = [
        bar("copy", "blk.0", 0, 5),
        bar("copy", "blk.1", 5, 9),
        bar("compute", "blk.0", 5, 6),
        bar("compute", "blk.1", 9, 10),
    ]
    assert timeline.disagreements(good, 0.01) == [] and timeline.lateness(good) == 0
    early = [*good[:3], bar("compute", "blk.1", 7.5, 8)]
    assert timeline.disagreements(early, 0.01) == ["blk.1 is computed 1.500 ms before it has arrived"]
    assert timeline.lateness(early) == 1.5
    first = bar("upload", "experts first", 6, 10)
    rest = [bar("copy", "blk.0", 9, 12), bar("copy", "blk.1", 12, 15)]
    assert timeline.disagreements([*good, *rest, first], 0.01) == [] and timeline.lateness([*good, *rest, first]) == 0
    assert len(timeline.disagreements([*good, *rest], 0.01)) == 2
    both = [bar("compute", "blk.0", 5, 6), bar("compute", "blk.1", 5.5, 6)]
    assert timeline.disagreements(both, 0.01) == ["compute: blk.1 begins 0.500 ms before blk.0 ends"]


@pytest.mark.parametrize(("top", "unit"), [(7.9, 1), (8.1, 2), (100, 20), (765, 100), (0.3, 0.05)])
def test_ticks_are_round(top: float, unit: float) -> None:
    assert svg.tick(top) == pytest.approx(unit)
