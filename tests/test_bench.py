"""The instruments: contenders with known delays, states of driver and page cache, counters with known power."""

import itertools
import json
import lzma
import mmap
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakecuda import ROOT, library

sys.path.append(str(ROOT / "bench"))  # behind tests/, which has a wire.py of its own

import coldstart
import contenders
import device
import energy
import measure
import nvml
from coldstart import Cell
from contenders import Contender
from measure import MeasurementError

from reflex_ipc.tokenizer import Tokenizer

SLACK = 400  # ms that a busy machine may add to a delay


@pytest.fixture
def file() -> Iterator[Path]:
    """A megabyte on the disk the sources are on: what is in memory only cannot be dropped from memory."""
    path = ROOT / "build" / "tests" / f"pages-{os.getpid()}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(os.urandom(1 << 20))
    yield path
    path.unlink()


class TestPageCache:
    def test_cold_and_warm(self, file: Path):
        measure.make_cold(file)
        assert measure.resident(file) == 0
        with open(file, "rb") as f:
            f.seek(file.stat().st_size - 1)
            f.read(1)
        assert 0 < measure.resident(file) < 1
        measure.make_warm(file)
        assert measure.resident(file) == 1

    def test_a_mapped_file_is_not_called_cold(self, file: Path):
        with open(file, "rb") as f, mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            assert sum(mapped[:: mmap.PAGESIZE])
            with pytest.raises(MeasurementError, match=r"stay in the page cache"):
                measure.make_cold(file)


def shell(script: str, name: str = "script", **more: Any) -> Contender:
    return Contender(name, ("sh", "-c", script), **more)


class TestStart:
    def test_first_byte_and_exit(self):
        run = coldstart.start(["sh", "-c", "sleep 0.2; printf x; sleep 0.15; printf yz"], os.environ)
        assert 200 <= run.first_ms < 200 + SLACK
        assert run.first_ms + 140 <= run.exit_ms < 350 + SLACK
        assert run.output == b"xyz"

    def test_an_echo_is_not_the_answer(self):
        run = coldstart.start(["sh", "-c", "printf prompt; sleep 0.2; printf A"], os.environ, echo=6)
        assert run.first_ms >= 200 and run.output == b"A"

    @pytest.mark.parametrize(
        ("script", "message"),
        [
            ("printf x; echo one >&2; echo why >&2; exit 3", "exit code 3: why"),
            ("true", "ended without a byte of output"),
            ("sleep 30 & exec sleep 31", "not over after 0.5 s, with 0 bytes of output: nothing on stderr"),
            ("echo x; echo why >&2; exec >&-; sleep 30", "not over after 0.5 s, with 2 bytes of output: why"),
            (
                "printf x; setsid sleep 3 & exit 0",
                "not over after 0.5 s, with 1 bytes",
            ),  # beyond killing, with the pipe
            ("exec yes", "not over after 0.5 s"),
        ],
    )
    def test_what_does_not_count(self, script: str, message: str):
        began = time.monotonic()
        with pytest.raises(coldstart.Failed, match=message):
            coldstart.start(["sh", "-c", script], os.environ, limit_s=0.5)
        assert time.monotonic() - began < 0.5 + SLACK / 1000

    def test_of_a_flood_the_beginning_is_kept(self):
        run = coldstart.start(["sh", "-c", "yes | head -c 5000000; printf end"], os.environ, echo=3)
        assert run.output == b"\n" + b"y\n" * ((coldstart.KEPT - 1) // 2) + b"y"

    def test_no_such_program(self):
        with pytest.raises(coldstart.Failed, match="does not start: No such file"):
            coldstart.start(["/nowhere/at/all"], os.environ)


class TestStates:
    def test_who_has_a_device_open(self, file: Path):
        with subprocess.Popen(["sleep", "60"], stdin=file.open("rb")) as process:
            assert coldstart.users(str(file)).get(process.pid) == "sleep"
            with (
                pytest.raises(MeasurementError, match="state idle: other processes"),
                coldstart.in_state("idle", device=str(file)),
            ):
                pass
            process.kill()
        assert process.pid not in coldstart.users(str(file))

    def test_idle_waits(self, monkeypatch: pytest.MonkeyPatch):
        assert coldstart.STATES["idle"].gap_s >= 4 and not coldstart.STATES["idle"].held
        monkeypatch.setitem(coldstart.STATES, "idle", coldstart.State(0.3, False))
        began = time.monotonic()
        with coldstart.in_state("idle") as gate:
            gate()
            assert time.monotonic() - began >= 0.3
            gate.ended()
            began = time.monotonic()
            time.sleep(0.25)  # what is done meanwhile is part of the wait
            gate()
            assert 0.3 <= time.monotonic() - began + 0.001 < 0.5

    def test_an_idle_start_is_as_long_behind_the_last_as_said_and_no_longer(
        self, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        """Each says when it began and ended; the discarded round waits for nothing."""
        monkeypatch.setitem(coldstart.STATES, "idle", coldstart.State(0.5, False))
        log = tmp_path / "log"
        script = f"import time; b = time.monotonic(); print(1, flush=True); open({str(log)!r}, 'a').write"
        script += "(f'{b} {time.monotonic()}\\n')"
        python = (sys.executable, "-I", "-S", "-c", script)
        found = [cell(Contender(name, python), file) for name in "ab"]
        rows = coldstart.rounds(found, "idle", "warm", 2, [])
        assert [row["n"] for row in rows] == [2, 2]
        times = [tuple(map(float, line.split())) for line in log.read_text().splitlines()]
        gaps = [begin - end for (_, end), (begin, _) in itertools.pairwise(times)]
        assert len(gaps) == 5 and gaps[0] < 0.4
        assert all(0.5 <= gap < 0.5 + SLACK / 1000 for gap in gaps[1:])

    def test_idle_rounds_end_in_time(self, file: Path, monkeypatch: pytest.MonkeyPatch):
        """The discarded round is short, and says nothing of how long the others take."""
        monkeypatch.setitem(coldstart.STATES, "idle", coldstart.State(0.4, False))
        until = time.monotonic() + 2.0
        found = [cell(shell("printf b", name), file) for name in "ab"]
        rows = coldstart.rounds(found, "idle", "warm", 50, [], until=until)
        assert time.monotonic() <= until and rows[0]["n"] == rows[1]["n"] >= 1

    def test_held_holds(self):
        """bench/hold.py on a driver without a device: it lives as long as the state, and is missed when it dies."""
        holder = [sys.executable, str(ROOT / "bench" / "hold.py"), str(library())]
        with coldstart.in_state("held", holder) as gate:
            gate()
            held = [p for p in Path("/proc").glob("[0-9]*") if str(library()).encode() in _command_line(p)]
            assert len(held) == 1
            os.kill(int(held[0].name), 9)
            time.sleep(0.2)
            with pytest.raises(MeasurementError, match="ended with -9"):
                gate()
        assert not [p for p in Path("/proc").glob("[0-9]*") if str(library()).encode() in _command_line(p)]

    def test_held_without_a_driver(self):
        with (
            pytest.raises(MeasurementError, match="could not be initialised"),
            coldstart.in_state("held", [sys.executable, str(ROOT / "bench" / "hold.py"), "/none.so"]),
        ):
            pass


def _command_line(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""


def _parent(process: Path) -> int | None:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def cell(contender: Contender, model: Path, prompt_tokens: int | None = 5) -> Cell:
    return Cell(contender, {"model": str(model), "prompt": "a b c d e", "log": str(model) + ".log"}, prompt_tokens)


class TestRounds:
    def test_interleaved_and_the_first_not_counted(self, file: Path, tmp_path: Path):
        log = tmp_path / "log"
        found = [cell(shell(f"printf {name} >>{log}; printf {name}", name), file) for name in "abc"]
        rows = coldstart.rounds(found, "back-to-back", "warm", 4, [])
        assert [row["n"] for row in rows] == [4, 4, 4] == [len(row["exit_ms"]) for row in rows]
        done = log.read_text()
        each = [done[i : i + 3] for i in range(0, len(done), 3)]
        assert len(each) == 5 and all(sorted(r) == list("abc") for r in each)
        assert len(set(each)) == 3  # none always follows the same one
        assert [row["output"] for row in rows] == list("abc")

    @pytest.mark.parametrize(("cache", "share"), [("cold", "0.0"), ("warm", "1.0")])
    def test_the_file_is_as_said_at_every_start(self, file: Path, cache: str, share: str):
        """The contender looks for itself, and then reads the file, or drops it."""
        see = f"import sys; sys.path.append({str(ROOT / 'bench')!r}); import measure; f = {str(file)!r}\n"
        see += "print(measure.resident(f)); " + ("measure.make_warm(f)" if cache == "cold" else "measure.make_cold(f)")
        python = Contender("look", (sys.executable, "-c", see))
        absent: list[dict[str, str]] = []
        [row] = coldstart.rounds([cell(python, file)], "back-to-back", cache, 2, absent)
        assert (row["output"], row["cache"], row["n"], absent) == (share + "\n", cache, 2, [])

    def test_who_fails_is_listed_and_the_others_go_on(self, file: Path, tmp_path: Path):
        once = shell(f"test -e {tmp_path}/x && exit 7; touch {tmp_path}/x; printf a", "breaks")
        absent: list[dict[str, str]] = []
        rows = coldstart.rounds(
            [cell(once, file), cell(shell("printf b", "works"), file)], "back-to-back", "warm", 3, absent
        )
        assert [(row["contender"], row["n"]) for row in rows] == [("works", 3)]
        assert absent == [
            {"contender": "breaks, 5 tokens", "why": "back-to-back, warm cache: exit code 7: nothing on stderr"}
        ]

    def test_who_is_for_another_page_cache_is_not_started(self, file: Path):
        found = [cell(shell("printf b", name, cache=name), file) for name in ("warm", "cold")]
        for cache in ("warm", "cold"):
            rows = coldstart.rounds(found, "back-to-back", cache, 1, [])
            assert [(row["contender"], row["cache"]) for row in rows] == [(cache, cache)]

    def test_it_ends_in_time_with_whole_rounds(self, file: Path):
        """And says how many were asked for."""
        found = [cell(shell("sleep 0.1; printf b", name), file) for name in "ab"]
        absent: list[dict[str, str]] = []
        rows = coldstart.rounds(found, "back-to-back", "warm", 50, absent, until=time.monotonic() + 1.0)
        assert 1 <= rows[0]["n"] == rows[1]["n"] <= 4
        why = f"back-to-back, warm cache: {rows[0]['n']} of 50 rounds, then the time was up"
        of = {"state": "back-to-back", "cache": "warm", "model": file.name}
        asked = {"reason": "no time", "kind": "coldstart", "of": of, "asked": 50, "done": rows[0]["n"]}
        assert absent == [{"contender": f"a, 5 tokens, b, 5 tokens: {file.name}", "why": why, **asked}]


class TestContenders:
    def test_the_committed_file(self, tmp_path: Path):
        named = contenders.read()
        assert [c.name for c in named][:2] == ["floor", "reflex"]
        assert {c.name for c in named} >= {"llama-completion", "llama-simple", "ollama", "vllm", "transformers"}
        ready, absent = contenders.locate(named, {"llama-simple": sys.executable}, tmp_path)
        assert {c.name for c, _ in ready} >= {"floor", "reflex", "reflex system1", *contenders.DISKS, "llama-simple"}
        assert {"contender": "vllm", "why": "no vllm-python on this machine"} in absent
        for contender, fields in ready:
            words = contender.argv({**fields, "model": "M", "prompt": "P", "context": "9"})
            assert not [word for word in words if "{" in word]
            assert ("P" in words) == contender.prompt

    def test_prompts_that_a_contender_is_for(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(contenders, "prompt", lambda _, n, variant: f"{n} {variant}")
        ready = [
            (shell("", "all"), {}),
            (shell("", "few", prompt_tokens=(5,)), {}),
            (shell("", "none", prompt=False), {}),
        ]
        found = coldstart.cells(ready, "m", [5, 512], 1)
        assert [(each.label, each.fields["prompt"]) for each in found] == [
            *(("all, 5 tokens", "5 1"), ("all, 512 tokens", "512 1"), ("few, 5 tokens", "5 1"), ("none", "")),
        ]

    @pytest.mark.parametrize("way", ["direct", "buffered"])
    @pytest.mark.parametrize("size", [5_000_001, 4 << 20, 4096, 1])
    def test_the_disk_alone(self, file: Path, tmp_path: Path, way: str, size: int):
        """A file of several pieces and no whole pages is read to its end; what it did to the page cache says how."""
        disk = contenders.compiled("disk", tmp_path)
        file.write_bytes(os.urandom(size))
        measure.make_cold(file)
        run = coldstart.start([str(disk), str(file), way], os.environ)
        assert run.output == f"{size}\n".encode()
        assert measure.resident(file) == (way == "buffered")
        for wrong, message in ((["/nowhere", way], "disk: /nowhere: No such file"), ([str(file), "fast"], "usage")):
            with pytest.raises(coldstart.Failed, match=message):
                coldstart.start([str(disk), *wrong], os.environ)

    def test_a_wrong_file_is_refused_by_name(self, tmp_path: Path):
        (tmp_path / "d.toml").write_text('[[contender]]\nname = "x"\ncommand = ["x"]\ncache = "hot"\n')
        with pytest.raises(MeasurementError, match=r"contender x: cache is 'hot', not warm or cold"):
            contenders.read(tmp_path / "d.toml")
        (tmp_path / "c.toml").write_text('[[contender]]\nname = "x"\ncommand = ["x"]\nflags = 1\n')
        with pytest.raises(MeasurementError, match=r"contender x: unknown keys \['flags'\]"):
            contenders.read(tmp_path / "c.toml")

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("[[contender]", r"Expected '\]\]'"),
            ("contender = 3", "a list"),
            ("", "a list"),
            ('[[contender]]\nname = "x"\ncommand = "echo hi"', "command is 'echo hi', not a list of texts"),
            ('[[contender]]\nname = "x"\ncommand = ["echo", 3]', r"command is \['echo', 3\]"),
            ('[[contender]]\nname = "x"\ncommand = []', "name and command are needed"),
            ('[[contender]]\nname = "x"\ncommand = ["x"]\nenv = { A = 1 }', "env is {'A': 1}, not texts by name"),
            ('[[contender]]\nname = "x"\ncommand = ["x"]\nprompt_tokens = [0]', r"prompt_tokens is \[0\], not a list"),
            ('[[contender]]\nname = ["x"]\ncommand = ["x"]', r"name is \['x'\], not a text"),
            ('[[contender]]\nname = "x"\ncommand = ["x"]\n' * 2, "two contenders have one name"),
        ],
    )
    def test_every_field_has_its_kind(self, tmp_path: Path, text: str, message: str):
        (tmp_path / "c.toml").write_text(text)
        with pytest.raises(MeasurementError, match=rf"c\.toml: .*{message}"):
            contenders.read(tmp_path / "c.toml")

    def test_no_such_contender_and_no_such_binary(self, tmp_path: Path):
        with pytest.raises(MeasurementError, match="no contender is called nobody"):
            contenders.choose(["floor", "nobody"], [], tmp_path)
        with pytest.raises(MeasurementError, match="--binary is NAME=PATH, not ollama"):
            contenders.choose([], ["ollama"], tmp_path)

    @pytest.mark.parametrize("name", ["qwen3", "qwen35", "deepseek-llm"])
    def test_prompts_have_the_asked_length(self, fixtures: Path, tmp_path: Path, name: str):
        model = tmp_path / "vocabulary.gguf"
        model.write_bytes(lzma.decompress((fixtures / "tokenizers" / f"{name}.vocab.gguf.xz").read_bytes()))
        texts = [contenders.prompt(model, n, variant) for n in (5, 128, 512, 2048) for variant in (0, 3)]
        tokenizer = Tokenizer.from_gguf(str(model))
        assert [len(tokenizer.encode(text)) for text in texts] == [5, 5, 128, 128, 512, 512, 2048, 2048]
        assert len(set(texts)) == 8


class Power:
    """A counter of a device with known power: 80 W idle, 180 W while busy, moving every 10 ms."""

    def __init__(self) -> None:
        self.busy_s = 0.0
        self.began = time.monotonic()
        self.since: float | None = None
        self.shown = 0.0, -1

    def joules(self) -> float:
        now = time.monotonic()
        tick = int((now - self.began) * 100)
        if tick != self.shown[1]:
            busy = self.busy_s + (now - self.since if self.since is not None else 0.0)
            self.shown = 80 * (now - self.began) + 100 * busy, tick
        return self.shown[0]

    def launch(self) -> None:
        self.since = time.monotonic()
        time.sleep(0.05)
        self.busy_s += time.monotonic() - self.since
        self.since = None


class TestEnergy:
    def test_known_power(self):
        power = Power()
        counter = energy.Counter(power.joules)
        # 10 ms; a busy machine sees one update late and the next in time.
        assert 0.005 < counter.interval_s < 0.03
        before = counter.power(0.3)
        batch = energy.starts(counter, power.launch, 10, 0.8)
        busy = power.busy_s
        after = counter.power(0.3)
        assert before == pytest.approx(80, rel=0.05) and after == pytest.approx(80, rel=0.05)
        assert batch.n >= 10 and batch.end.at - batch.begin.at >= 0.8
        result = energy.figures(batch, counter.interval_s, before, after)
        assert result.net_j is not None
        assert abs(result.net_j - 100 * busy / batch.n) <= result.net_error_j + 0.05
        gross = (100 * busy + 80 * (batch.end.at - batch.begin.at)) / batch.n
        assert abs(result.gross_j - gross) <= result.gross_error_j

    def test_what_there_is_no_time_for_is_listed(self, file: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(energy, "SETTLE_S", 0.01)
        absent: list[dict[str, object]] = []
        counter = energy.Counter(Power().joules)
        found = [cell(shell("exit 7", "a"), file), cell(shell("exit 7", "b"), file, None)]
        assert not energy.measure_cells(found, counter, 20, 1.0, 0.1, absent, time.monotonic())
        of = [{"model": file.name, "contender": name, "prompt_tokens": n} for name, n in (("a", 5), ("b", None))]
        asked = {"reason": "no time", "kind": "energy", "asked": 20, "done": 0}
        words = {"why": "energy: no time was left"}
        assert absent == [
            {"contender": "a, 5 tokens", **words, **asked, "of": of[0]},
            {"contender": "b", **words, **asked, "of": of[1]},
        ]

    def test_figures(self):
        batch = energy.Batch(20, energy.Edge(100.0, 5000.0), energy.Edge(110.0, 6500.0))
        assert energy.figures(batch, 0.1, 80.0, 82.0) == pytest.approx((75.0, 0.75, 34.5, 1.25))
        # Idle power that moved by 40 W leaves nothing to say about net.
        assert energy.figures(batch, 0.1, 60.0, 100.0).net_j is None

    def test_below_the_resolution(self):
        batch = energy.Batch(1, energy.Edge(0.0, 0.0), energy.Edge(0.5, 60.0))
        with pytest.raises(MeasurementError, match=r"1 starts in 0.50 s .* every 100 ms: measure at least 1.0 s"):
            energy.figures(batch, 0.1, 80.0, 80.0)

    def test_a_counter_that_stands_still(self):
        counter = energy.Counter(Power().joules)
        counter._joules = lambda: 1.0
        with pytest.raises(MeasurementError, match="did not move"):
            counter.edge(0.1)

    def test_nvml(self, tmp_path: Path):
        """Device through ctypes, against a library whose answers are known."""
        lib = _nvml(tmp_path)
        with nvml.Device(library=str(lib)) as opened:
            assert opened.joules() == 1234.567
            about = opened.describe()
        assert about["name"] == "A device" and about["driver"] == "580.1" and about["cuda"] == "13.0"
        assert about["persistence"] == 1 and about["pcie_width"] is None
        with pytest.raises(nvml.NVMLError, match="no NVML"):
            nvml.Device(library=str(tmp_path / "none.so"))
        with pytest.raises(nvml.NVMLError, match="nvmlDeviceGetHandleByIndex_v2 failed: error 6"):
            nvml.Device(1, library=str(lib))


def _nvml(folder: Path) -> Path:
    source, lib = folder / "nvml.c", folder / "nvml.so"
    source.write_text("""
        #include <stdio.h>
        static int device;
        int nvmlInit_v2(void) { return 0; }
        int nvmlShutdown(void) { return 0; }
        int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **d) { *d = &device; return i ? 6 : 0; }
        int nvmlDeviceGetTotalEnergyConsumption(void *d, unsigned long long *mj) { *mj = 1234567; return d != &device; }
        int nvmlDeviceGetName(void *d, char *s, unsigned n) { snprintf(s, n, "A device"); return d != &device; }
        int nvmlSystemGetDriverVersion(char *s, unsigned n) { snprintf(s, n, "580.1"); return 0; }
        int nvmlSystemGetCudaDriverVersion_v2(int *v) { *v = 13000; return 0; }
        int nvmlDeviceGetPersistenceMode(void *d, unsigned *v) { *v = 1; return d != &device; }
        int nvmlDeviceGetMaxPcieLinkWidth(void *d, unsigned *v) { return 3; }
    """)
    subprocess.run(["cc", "-shared", "-fPIC", source, "-o", lib], check=True)
    return lib


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver without a device, whose start takes 60 ms."""
    (tmp_path / "libcuda.so.1").symlink_to(library())
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv("FAKECUDA_INIT_MS", "60")


@pytest.mark.usefixtures("driver")
class TestCommands:
    def test_coldstart(self, file: Path, tmp_path: Path):
        toml = """
            [[contender]]
            name = "floor"
            command = ["{floor}", "{start}", "{model}"]
            prompt = false
            [[contender]]
            name = "late"
            command = ["sh", "-c", "sleep 0.25; printf x"]
            prompt = false
            [[contender]]
            name = "absent"
            binary = "no-such-engine"
            command = ["{binary}"]
        """
        (tmp_path / "c.toml").write_text(toml)
        out = tmp_path / "out.json"
        command = [sys.executable, ROOT / "bench" / "coldstart.py", file, "--out", out, "-n", "3"]
        command += ["--state", "back-to-back", "--state", "held"]
        result = subprocess.run([*command, "--contenders", tmp_path / "c.toml"], capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        saved = json.loads(out.read_text())
        assert [(row["state"], row["contender"], row["n"]) for row in saved["rows"]] == [
            (state, name, 3) for state in ("back-to-back", "held") for name in ("floor", "late")
        ]
        for row in saved["rows"]:
            assert min(row["first_ms"]) >= (60 if row["contender"] == "floor" else 250)
        assert saved["not_run"] == [{"contender": "absent", "why": "no no-such-engine on this machine"}]
        assert saved["models"] == [{"file": file.name, "bytes": 1 << 20, "sha256": measure.sha256(file)}]
        assert "not run: absent" in result.stdout and "x floor" in result.stdout
        # With the contenders of the project a prompt is needed, and such a file has no tokenizer.
        refused = subprocess.run(command, capture_output=True, text=True)
        assert refused.returncode == 1 and "not a GGUF file" in refused.stderr and "Traceback" not in refused.stderr

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
    def test_what_was_measured_is_kept_and_nothing_left_running(self, file: Path, tmp_path: Path, number: int):
        """Ended in the midst of the second state: the first is in the file. Of what was started nothing lives on, but
        for a start itself where the tool could not know (SIGKILL)."""
        script = f"[ -e {tmp_path}/slow ] && sleep 4; echo x"
        toml = f'[[contender]]\nname = "x"\nprompt = false\ncommand = ["sh", "-c", {json.dumps(script)}]\n'
        (tmp_path / "c.toml").write_text(toml)
        out, scratch = tmp_path / "out.json", tmp_path / "scratch"
        scratch.mkdir()
        command = [sys.executable, ROOT / "bench" / "coldstart.py", file, "--out", out, "-n", "2"]
        command += ["--state", "back-to-back", "--state", "held", "--contenders", tmp_path / "c.toml"]
        environment = {**os.environ, "TMPDIR": str(scratch)}
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment) as tool:
            deadline = time.monotonic() + 10
            while not out.exists() and time.monotonic() < deadline:
                time.sleep(0.001)
            (tmp_path / "slow").touch()
            time.sleep(0.8)
            started = [process for process in Path("/proc").glob("[0-9]*") if _parent(process) == tool.pid]
            assert started
            tool.send_signal(number)
            assert tool.stderr is not None and tool.stderr.read() == b""
        assert tool.returncode == (-9 if number == signal.SIGKILL else 128 + number)
        saved = json.loads(out.read_text())
        assert [(row["state"], row["n"]) for row in saved["rows"]] == [("back-to-back", 2)]
        time.sleep(0.2)
        alive = [command for process in started if (command := _command_line(process))]
        assert not [command for command in alive if b"hold.py" in command]
        assert not alive or number == signal.SIGKILL
        assert not [*scratch.iterdir()] and [path.name for path in tmp_path.glob(".out*")] == []

    def test_a_state_that_cannot_be_had_does_not_take_the_others_along(self, file: Path, tmp_path: Path):
        (tmp_path / "c.toml").write_text('[[contender]]\nname = "x"\nprompt = false\ncommand = ["echo", "x"]\n')
        (tmp_path / "libcuda.so.1").unlink()
        out = tmp_path / "out.json"
        command = [sys.executable, ROOT / "bench" / "coldstart.py", file, "--out", out, "-n", "1"]
        command += ["--contenders", tmp_path / "c.toml"]
        states = ["--state", "back-to-back", "--state", "held"]
        done = subprocess.run([*command, *states], capture_output=True, text=True)
        assert done.returncode == 0
        why = "state held: the driver could not be initialised"
        saved = json.loads(out.read_text())
        assert [row["state"] for row in saved["rows"]] == ["back-to-back"]
        assert saved["not_run"] == [{"contender": f"held, warm cache: {file}", "why": why}]
        assert subprocess.run([*command, "--state", "held"], capture_output=True).returncode == 1

    def test_device(self, tmp_path: Path):
        """Everything, as far as it goes without a GPU: the floor runs, what cannot be had is listed."""
        shape = ["--models", "qwen3-0.6b", "--target", "none", "--only", "back-to-back", "--limit", "25"]
        command = [
            sys.executable,
            ROOT / "bench" / "device.py",
            tmp_path / "out",
            "--folder",
            tmp_path / "models",
            *shape,
        ]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert result.returncode == 0, result.stderr
        saved = json.loads((tmp_path / "out" / "coldstart-back-to-back.json").read_text())
        [row] = [row for row in saved["rows"] if row["contender"] == "floor"]
        assert row["n"] >= 1 and min(row["first_ms"]) >= 60
        assert {"contender": "ollama", "why": "no ollama on this machine"} in saved["not_run"]
        # Ours runs on that driver where kernels are built; it is in the rows or, with the reason, in the list.
        shown = [r["contender"] for r in saved["rows"]] + [e["contender"].split(",")[0] for e in saved["not_run"]]
        assert "reflex" in shown
        assert saved["models"][0]["sha256"] == measure.sha256(tmp_path / "models" / "qwen3-0.6b-Q4_K_M.gguf")
        (tmp_path / "models" / "qwen3-0.6b-Q4_K_M.gguf").unlink()

    def test_a_cold_call(self, tmp_path: Path):
        """The floor and the disk in the same rounds; the model file on a disk, not in memory."""
        folder = ROOT / "build" / "tests" / f"models-{os.getpid()}"
        command = [sys.executable, ROOT / "bench" / "device.py", tmp_path / "out", "--folder", folder, "--only", "cold"]
        command += [
            "--models",
            "qwen3-0.6b",
            "--target",
            "none",
            "--n",
            "2",
            "--contenders",
            "floor",
            *contenders.DISKS,
        ]
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=120)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        assert result.returncode == 0, result.stderr
        rows = json.loads((tmp_path / "out" / "coldstart-cold-qwen3-0.6b.json").read_text())["rows"]
        assert [(row["contender"], row["state"], row["cache"], row["n"]) for row in rows] == [
            (name, "back-to-back", "cold", 2) for name in ("floor", *contenders.DISKS)
        ]
        best = min(measure.summary(row["first_ms"]).median for row in rows[1:])
        lines = {line.split("  ")[0]: line.split() for line in result.stdout.splitlines()}
        floor = measure.summary(rows[0]["first_ms"]).median
        assert lines["floor"][-2:] == ["1.00", f"{floor / best:.2f}"]
        assert {lines[name][-1] for name in contenders.DISKS} >= {"1.00"}
        refused = subprocess.run([*command[:-1], "nobody"], capture_output=True, text=True)
        assert (refused.returncode, refused.stderr) == (1, "device: no contender is called nobody\n")

    def test_families(self, tmp_path: Path):
        """The same with the table of families; ours and what is loaded cannot be had."""
        out, folder = tmp_path / "out", tmp_path / "models"
        command = [sys.executable, ROOT / "bench" / "families.py", out, "--models", "qwen3-0.6b", "--folder", folder]
        result = subprocess.run([*command, "--limit", "60"], capture_output=True, text=True, timeout=120)
        assert result.returncode == 0, result.stderr
        [row] = [
            r for r in json.loads((out / "coldstart-qwen3-0.6b.json").read_text())["rows"] if r["contender"] == "floor"
        ]
        floor = f"{measure.summary(row['first_ms']).median:.1f}"
        line = result.stdout.splitlines()[-1].split()
        assert line[:3] == ["qwen3-0.6b", "0.40", floor]
        assert "all shapes: " in result.stdout.splitlines()[2]  # said before anything is done
        assert "not run: warm, qwen3-0.6b: " in result.stdout
        assert not list(folder.glob("*.gguf"))


def test_a_part_that_fails_does_not_end_the_others(tmp_path: Path):
    session = device.Session(tmp_path, 60)
    done = []

    def fails() -> None:
        raise MeasurementError("not here")

    session.part("first", ["m"], fails)
    session.part("second", ["m"], done.append, 1)
    session.until = time.monotonic() - 1
    session.part("third", ["m", "k"], done.append, 2)
    assert done == [1]
    assert session.absent == [
        {"contender": "first, m", "why": "not here"},
        {
            "contender": "third, m, k",
            "why": "no time was left",
            "reason": "no time",
            "part": "third",
            "models": ["m", "k"],
        },
    ]


OLLAMA = """
import http.server, json, os, sys
if sys.argv[1] == "create":
    open(sys.argv[0] + ".created", "w").write(" ".join(sys.argv[2:3]) + " " + open(sys.argv[4]).read())
    sys.exit()
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200); self.end_headers()
        for text in ("", f"{asked['model']}:{asked['prompt']}:{asked['options']['num_predict']}"):
            self.wfile.write(json.dumps({"response": text}).encode() + b"\\n")
    def log_message(self, *_): pass
host, port = os.environ["OLLAMA_HOST"].split(":")
http.server.HTTPServer((host, int(port)), Handler).serve_forever()
"""


def test_a_start_of_ollama(tmp_path: Path):
    """As contenders.toml starts it, with a server that answers as its interface says."""
    fake = tmp_path / "ollama"
    # A shell finds an interpreter whose path has spaces; to Python the second line is a string.
    fake.write_text(f'#!/bin/sh\n"exec" "{sys.executable}" "$0" "$@"\n{OLLAMA}')
    fake.chmod(0o755)
    [(contender, fields)], _ = contenders.locate(
        [c for c in contenders.read() if c.name == "ollama"], {"ollama": str(fake)}, tmp_path
    )
    model = tmp_path / "M.gguf"
    model.write_bytes(b"x")
    found = [Cell(contender, {**fields, "model": str(model), "prompt": "a b", "context": "9"}, 5)]
    absent: list[dict[str, str]] = []
    assert coldstart.prepare(found, absent) == found and not absent
    assert Path(f"{fake}.created").read_text() == f"bench-m FROM {model}\n"
    assert found[0].launch().output == b"bench-m:a b:1"
