"""The instruments: contenders with known delays, counters with known power, statistics against Python's own."""

import itertools
import json
import lzma
import math
import mmap
import os
import random
import statistics
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from fakecuda import ROOT, library

sys.path.append(str(ROOT / "bench"))  # behind tests/, which has a wire.py of its own

import coldstart
import compare
import contenders
import device
import energy
import gguf_out
import measure
import models
import nvml
import report
import svg
import work
from coldstart import Cell
from contenders import Contender
from measure import MeasurementError

from reflex_ipc import archs
from reflex_ipc.engine import Engine
from reflex_ipc.gguf import GGUF
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


class TestStatistics:
    def test_summary(self):
        rng = random.Random(1)
        for n in (2, 3, 7, 20, 21):
            runs = [rng.gauss(100, 10) for _ in range(n)]
            s = measure.summary(runs)
            assert (s.n, s.min, s.median) == (n, min(runs), statistics.median(runs))
            assert s.p90 == pytest.approx(statistics.quantiles(runs, n=10, method="inclusive")[8], rel=1e-12)
        assert measure.summary([5.0]) == (1, 5.0, 5.0, 5.0)

    @pytest.mark.parametrize(("m", "n"), [(1, 1), (3, 3), (5, 4), (2, 6)])
    def test_rank_test_is_exact_where_few_runs_are(self, m: int, n: int):
        """Against the count of all ways to share the runs out."""
        rng = random.Random(m * 10 + n)
        runs = [rng.random() for _ in range(m + n)]

        def u(after: tuple[int, ...]) -> int:
            return sum(runs[i] > runs[j] for i in after for j in range(m + n) if j not in after)

        ways = [u(after) for after in itertools.combinations(range(m + n), n)]
        for after in itertools.combinations(range(m + n), n):
            p = measure.rank_test([runs[j] for j in range(m + n) if j not in after], [runs[i] for i in after])
            assert p == pytest.approx(sum(w >= u(after) for w in ways) / len(ways), rel=1e-12)

    def test_rank_test_of_many_runs(self):
        """Against sharing the runs out at random; half of the cases have ties, where p is an approximation."""
        rng = np.random.default_rng(3)
        for width, shift in ((1, 0.5), (1, 3.5), (4, 1.0), (2, 1.0)):
            before = [float(i // width) for i in range(20)]
            after = [x + shift for x in before]
            ranks = np.array(
                [2 * sum(y < x for y in before + after) + (before + after).count(x) for x in before + after]
            )
            sums = np.array([rng.permutation(ranks)[20:].sum() for _ in range(20_000)])
            assert measure.rank_test(before, after) == pytest.approx((sums >= ranks[20:].sum()).mean(), abs=0.01)
        assert measure.rank_test([3.0] * 20, [3.0] * 20) == 1.0
        tied = [float(i // 4) for i in range(20)]
        assert 0.45 < measure.rank_test(tied, tied) < 0.55


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
            ("sleep 30 & wait", "exit code -9: nothing on stderr"),
        ],
    )
    def test_what_does_not_count(self, script: str, message: str):
        with pytest.raises(coldstart.Failed, match=message):
            coldstart.start(
                ["sh", "-c", f"exec >/dev/null; {script}" if "&" in script else script], os.environ, limit_s=0.5
            )

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
        with coldstart.in_state("idle") as before:
            began = time.monotonic()
            before()
            assert time.monotonic() - began >= 0.3

    def test_held_holds(self):
        """bench/hold.py on a driver without a device: it lives as long as the state, and is missed when it dies."""
        holder = [sys.executable, str(ROOT / "bench" / "hold.py"), str(library())]
        with coldstart.in_state("held", holder) as before:
            before()
            held = [p for p in Path("/proc").glob("[0-9]*") if str(library()).encode() in _command_line(p)]
            assert len(held) == 1
            os.kill(int(held[0].name), 9)
            time.sleep(0.2)
            with pytest.raises(MeasurementError, match="ended with -9"):
                before()
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

    def test_it_ends_in_time_with_whole_rounds(self, file: Path):
        found = [cell(shell("sleep 0.1; printf b", name), file) for name in "ab"]
        rows = coldstart.rounds(found, "back-to-back", "warm", 50, [], until=time.monotonic() + 1.0)
        assert 1 <= rows[0]["n"] == rows[1]["n"] <= 4


class TestContenders:
    def test_the_committed_file(self, tmp_path: Path):
        named = contenders.read()
        assert [c.name for c in named][:2] == ["floor", "reflex"]
        assert {c.name for c in named} >= {"llama-completion", "llama-simple", "ollama", "vllm", "transformers"}
        ready, absent = contenders.locate(named, {"llama-simple": sys.executable}, tmp_path)
        assert {c.name for c, _ in ready} >= {"floor", "reflex", "llama-simple"}
        assert {"contender": "vllm", "why": "no vllm-python on this machine"} in absent
        for contender, fields in ready:
            words = contender.argv({**fields, "model": "M", "prompt": "P", "context": "9"})
            assert not [word for word in words if "{" in word]
            assert ("P" in words) == contender.prompt

    def test_a_wrong_file_is_refused_by_name(self, tmp_path: Path):
        (tmp_path / "c.toml").write_text('[[contender]]\nname = "x"\ncommand = ["x"]\nflags = 1\n')
        with pytest.raises(MeasurementError, match=r"contender x: unknown keys \['flags'\]"):
            contenders.read(tmp_path / "c.toml")

    @pytest.mark.parametrize("name", ["qwen3", "qwen35", "deepseek-llm"])
    def test_prompts_have_the_asked_length(self, fixtures: Path, tmp_path: Path, name: str):
        model = tmp_path / "vocabulary.gguf"
        model.write_bytes(lzma.decompress((fixtures / "tokenizers" / f"{name}.vocab.gguf.xz").read_bytes()))
        texts = [contenders.prompt(model, n, variant) for n in (5, 512) for variant in (0, 3)]
        tokenizer = Tokenizer.from_gguf(str(model))
        assert [len(tokenizer.encode(text)) for text in texts] == [5, 5, 512, 512]
        assert len(set(texts)) == 4


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
        assert 0.008 < counter.interval_s < 0.03
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


PARAMETERS = {
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "deepseek-v2-lite": 15_706_484_224,
}
"""Of the published checkpoints, a tied output matrix counted once."""


@pytest.fixture(scope="module")
def words(fixtures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary of 512 tokens, so that other readers are quick with the file."""
    path = tmp_path_factory.mktemp("words") / "small.xz"
    path.write_bytes(lzma.compress((fixtures / "exact" / "qwen3-f16.gguf").read_bytes(), preset=0))
    return path


def small(name: str) -> models.Shape:
    """A shape with few layers, experts and tokens."""
    shape = models.SHAPES[name]
    n_layer = 4 if shape.n_head_v else 2
    return shape._replace(n_layer=n_layer, n_vocab=640, n_expert=8 if shape.n_expert else 0)


def write(path: Path, name: str, shape: models.Shape, mix: str, words: Path) -> list[gguf_out.Tensor]:
    tensors = models.tensors(shape, mix)
    gguf_out.write(path, models.metadata(name, shape, mix), words, shape.n_vocab, tensors, seed=7)
    return tensors


class TestModels:
    @pytest.mark.parametrize("name", PARAMETERS)
    def test_parameters(self, name: str):
        tensors = models.tensors(models.SHAPES[name], "Q4_K_M")
        assert sum(tensor.n_elements for tensor in tensors) == PARAMETERS[name]

    def test_mix(self):
        """8B in Q4_K_M as the quantiser's rule has it, and with it the size of the published file, 5.03 GB."""
        tensors = {t.name: t.type for t in models.tensors(models.SHAPES["qwen3-8b"], "Q4_K_M")}
        finer = [i for i in range(36) if tensors[f"blk.{i}.ffn_down.weight"] == "Q6_K"]
        assert finer == [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 30, *range(31, 36)]
        assert finer == [i for i in range(36) if tensors[f"blk.{i}.attn_v.weight"] == "Q6_K"]
        assert (tensors["output.weight"], tensors["token_embd.weight"]) == ("Q6_K", "Q4_K")
        lite = {t.name: t.type for t in models.tensors(models.SHAPES["deepseek-v2-lite"], "Q4_K_M")}
        assert {lite[f"blk.{i}.ffn_down_exps.weight"] for i in range(1, 27)} == {"Q5_0", "Q8_0"}  # rows of 1408
        assert lite["blk.5.attn_k_b.weight"] == "Q5_0"

    @pytest.mark.parametrize(
        ("name", "mix"), [*((name, "Q4_K_M") for name in models.SHAPES), ("qwen3-0.6b", "Q8_0"), ("qwen3-0.6b", "BF16")]
    )
    def test_the_gguf_package_reads_them(self, name: str, mix: str, words: Path, tmp_path: Path):
        path = tmp_path / "m.gguf"
        shape = small(name)
        tensors = write(path, name, shape, mix, words)
        reader = gguf.GGUFReader(path)
        assert {t.name: (t.tensor_type.name, tuple(map(int, t.shape))) for t in reader.tensors} == {
            t.name: (t.type, t.ne) for t in tensors
        }
        assert reader.fields["general.architecture"].contents() == shape.arch
        assert reader.fields[f"{shape.arch}.block_count"].contents() == shape.n_layer
        tokens = reader.fields["tokenizer.ggml.tokens"].contents()
        assert len(tokens) == 640 == len(reader.fields["tokenizer.ggml.token_type"].contents())
        assert tokens[512] == "[PAD512]" and reader.fields["tokenizer.ggml.token_type"].contents()[-1] == 5
        for tensor in reader.tensors:
            if tensor.tensor_type.name != "F32":  # as wide a spread as a trained row times a normalised vector has
                rows = tensor.data.reshape(-1, tensor.data.shape[-1])[:64]
                values = gguf.quants.dequantize(rows, tensor.tensor_type)
                assert values.std() * math.sqrt(tensor.shape[0]) == pytest.approx(1, rel=0.08), tensor.name
                assert abs(values.mean()) < 0.1 * values.std(), tensor.name
        path.unlink()

    @pytest.mark.parametrize(
        "name", ["qwen3-0.6b", "qwen3-30b-a3b", "qwen3.5-0.8b", "qwen3.5-35b-a3b", "deepseek-v2-lite"]
    )
    def test_a_forward_pass(self, name: str, words: Path, tmp_path: Path):
        path = tmp_path / "m.gguf"
        write(path, name, small(name), "Q4_K_M", words)
        with Engine.open(path, backend="cpu", context=32) as engine:
            logits = engine.logits(list(range(5, 13)))
        assert logits.shape == (8, 640)
        assert 0.8 < logits.std() < 1.2  # normalised rows times random ones
        assert len(np.unique(logits[-1])) > 600  # rows of the output matrix differ
        path.unlink()

    def test_the_same_again(self, words: Path, tmp_path: Path):
        for path in (tmp_path / "a", tmp_path / "b"):
            write(path, "qwen3-0.6b", small("qwen3-0.6b"), "Q4_K_M", words)
        assert measure.sha256(tmp_path / "a") == measure.sha256(tmp_path / "b")

    def test_the_command_with_the_real_vocabulary(self, tmp_path: Path):
        out = tmp_path / "m.gguf"
        command = [sys.executable, ROOT / "bench" / "models.py", out, "qwen3-0.6b", "--layers", "1"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert "GB/s" in said
        with GGUF.open(out) as opened:
            assert archs.build(opened).n_vocab == 151936
            tokenizer = Tokenizer.from_gguf(opened)
            assert tokenizer.n_vocab == 151936
            assert tokenizer.decode(tokenizer.encode("The capital of France")) == "The capital of France"


class TestWork:
    def test_a_dense_model(self, words: Path, tmp_path: Path):
        """Decoding and a prompt, against sums by hand."""
        shape = small("qwen3-0.6b")
        tensors = write(tmp_path / "m", "qwen3-0.6b", shape, "Q4_K_M", words)
        with GGUF.open(tmp_path / "m") as opened:
            plan = archs.build(opened)
            one, prompt = work.step(plan, 1, 100, 1), work.step(plan, 10, 0, 1)
        matrices = [t for t in tensors if len(t.ne) == 2]
        embedding = next(t for t in matrices if t.name == "token_embd.weight")
        layers = sum(t.n_elements for t in matrices) - embedding.n_elements
        width, kept = 16 * 128, 2 * 8 * 128 * 2  # of q; of k and v, in bytes
        assert one.flops == 2 * (layers + embedding.n_elements) + shape.n_layer * 4 * width * 101
        row = embedding.nbytes / 640
        assert one.bytes == sum(t.nbytes for t in matrices) + row + shape.n_layer * kept * 101
        assert prompt.flops == 20 * layers + 2 * embedding.n_elements + shape.n_layer * 4 * width * 55
        assert prompt.bytes == one.bytes + 9 * row - shape.n_layer * kept * 91

    def test_experts(self, words: Path, tmp_path: Path):
        shape = small("qwen3-30b-a3b")._replace(n_used=2)
        tensors = write(tmp_path / "m", "qwen3-30b-a3b", shape, "Q4_K_M", words)
        with GGUF.open(tmp_path / "m") as opened:
            plan = archs.build(opened)
            one, many = work.step(plan, 1, 0, 0), work.step(plan, 1000, 0, 0)
        slabs = sum(t.nbytes for t in tensors if "_exps" in t.name)
        rest = sum(t.nbytes for t in tensors if t.name.startswith("blk.") and len(t.ne) == 2)
        row, kept = next(t for t in tensors if t.name == "token_embd.weight").nbytes / 640, 2 * 4 * 128 * 2 * 2
        assert one.bytes == pytest.approx(slabs * 2 / 8 + rest + row + kept)
        assert many.bytes == pytest.approx(slabs + rest + 1000 * (row + kept))


def document(kind: str, rows: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    gpu = {
        "name": "A device",
        "driver": "580.1",
        "cuda": "13.0",
        "persistence": 1,
        "pcie_generation": 5,
        "pcie_width": 16,
    }
    host = {"cpu": "A processor", "cores": 16, "memory_bytes": 1 << 37, "kernel": "6.1", "python": "3.12.3"}
    return {
        "schema": 1,
        "kind": kind,
        "when": "2026-01-02T03:04:05Z",
        "command": ["bench/device.py", "OUT"],
        "source": {"commit": "c0ffee", "changed": False, "sources_sha256": "ab" * 32},
        "machine": {"gpu": gpu, **host, "driver_environment": {}},
        "models": [
            {"file": m, "bytes": b, "sha256": "cd" * 32} for m, b in (("s.gguf", 4 * 10**8), ("l.gguf", 5 * 10**9))
        ],
        "rows": rows,
        "not_run": [{"contender": "ollama", "why": "no ollama on this machine"}],
        **more,
    }


def starts(
    contender: str, first: list[float], model: str = "s.gguf", tokens: int | None = 5, **more: Any
) -> dict[str, Any]:
    return {
        "state": "held",
        "cache": "warm",
        "model": model,
        "contender": contender,
        "prompt_tokens": tokens,
        "command": [contender, model],
        "env": {},
        "n": len(first),
        "first_ms": first,
        "exit_ms": [x + 50 for x in first],
        "output": "x",
        **more,
    }


def joules(contender: str, gross: float, error: float = 0.5) -> dict[str, Any]:
    figures = {"gross_j": gross, "gross_error_j": error, "net_j": None, "net_error_j": 3.0, "n": 30, "batch_s": 12.0}
    of = {"state": "back-to-back", "cache": "warm", "model": "s.gguf", "contender": contender, "prompt_tokens": 5}
    return {
        **of,
        **figures,
        "joules": 30 * gross,
        "idle_before_w": 80.0,
        "idle_after_w": 81.0,
        "counter_interval_s": 0.1,
    }


RATES = {
    "by": "torch 2",
    "copy_bytes_s": 4e12,
    "read_bytes_s": 4.5e12,
    "host_to_device_bytes_s": 55e9,
    "bf16_flop_s": 8e14,
}


def results() -> list[dict[str, Any]]:
    rows = [starts("floor", [80.0, 82.0, 84.0], tokens=None), starts("floor", [180.0] * 3, "l.gguf", None)]
    rows += [
        starts("reflex", [90.0, 92.0, 95.0]),
        starts("reflex", [99.0] * 3, tokens=512),
        starts("reflex", [190.0] * 3, "l.gguf"),
    ]
    decode = {
        "engine": "reflex",
        "what": "decode",
        "depth": 128,
        "tokens": 10,
        "seconds": [0.01] * 3,
        "per_second": 1000.0,
    }
    warm = {**decode, "bytes": 2.25e10, "flops": 8e10}
    return [
        document("coldstart", rows),
        document("energy", [joules("floor", 40.0), joules("reflex", 45.0)]),
        document("warm", [warm], rates=RATES, backend="cuda"),
    ]


class TestReport:
    def test_page(self, tmp_path: Path):
        for i, result in enumerate(results()):
            measure.save(tmp_path / "in" / f"{i}.json", result)
        command = [sys.executable, ROOT / "bench" / "report.py", tmp_path / "in", "--out", tmp_path / "page.md"]
        subprocess.run(command, check=True, capture_output=True)
        page = (tmp_path / "page.md").read_text()
        assert "| s.gguf | reflex | 5 | 3 | 90.0 | 92.0 | 94.4 | 142.0 | +10.0 ms, 1.12 |" in page
        for text in (
            "A device, driver 580.1",
            "c0ffee",
            "cd" * 32,
            "| ollama | no ollama on this machine |",
            "45.0 ± 0.5",
        ):
            assert text in page
        # 2.25e10 bytes in 10 ms are 2.25 TB/s, half of the read rate; 8e10 operations 8 TFLOP/s, 1% of the products'.
        assert "| decode 10 at depth 128 | reflex | 3 | 1000 | 10.00 | 2250 | 8.0 | 50.0 | 56.2 | 1.0 |" in page
        assert "below resolution" in page and "python bench/device.py OUT" in page
        plots = sorted(path.name for path in (tmp_path / "page").glob("*.svg"))
        assert plots == [
            "coldstart-held-warm.svg",
            "energy.svg",
            "first-token-over-prompt-held.svg",
            "first-token-over-size-held.svg",
        ]
        for name in plots:
            assert f"(page/{name})" in page
            ElementTree.parse(tmp_path / "page" / name)

    def test_bars_are_to_scale(self):
        bars = [svg.Bar("a", 100.0, "red", (90.0, 120.0)), svg.Bar("b", 50.0, "blue")]
        tree = ElementTree.fromstring(svg.bars("t <&>", "ms", [svg.Group("g", bars, mark=25.0)]))
        space = "{http://www.w3.org/2000/svg}"
        wide, narrow = (float(r.get("width", "0")) for r in tree.iter(space + "rect"))
        begin = float(next(tree.iter(space + "rect")).get("x", "0"))
        assert wide == pytest.approx(2 * narrow, abs=0.2)
        mark = [e for e in tree.iter(space + "line") if e.get("stroke-dasharray")]
        assert float(mark[0].get("x1", "0")) - begin == pytest.approx(wide / 4, abs=0.2)

    def test_one_machine_and_one_source_a_page(self):
        for where, name, value in (("machine", "cpu", "another"), ("source", "sources_sha256", "ef" * 32)):
            first, second = results()[:2]
            second[where] = {**second[where], name: value}
            with pytest.raises(MeasurementError, match="of different"):
                report.page([first, second], "p")

    def test_no_row_twice(self):
        with pytest.raises(MeasurementError, match=r"two results for coldstart, held, warm, s\.gguf, floor"):
            report.page([results()[0], results()[0]], "p")

    def test_what_is_no_result_is_refused(self, tmp_path: Path):
        (tmp_path / "x.json").write_text('{"schema": 2}')
        with pytest.raises(MeasurementError, match="is no result"):
            compare.load(tmp_path)


def noisy(median: float, seed: int, n: int = 20) -> list[float]:
    rng = random.Random(seed)
    return [median + rng.gauss(0, 2) for _ in range(n)]


def found(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> dict[str, str]:
    a, b = ([document("coldstart", rows)] for rows in (old, new))
    return {f.row.split(", ", 4)[-1]: f.verdict for f in compare.compare(a, b)}


class TestCompare:
    def test_slower_faster_same(self):
        old = [starts("floor", noisy(80, 1), tokens=None), *(starts(c, noisy(100, i)) for i, c in enumerate("abc", 2))]
        new = [
            starts("floor", noisy(80, 5), tokens=None),
            starts("a", noisy(106, 6)),
            starts("b", noisy(95, 7)),
            starts("c", noisy(100, 8)),
        ]
        verdicts = found(old, new)
        assert verdicts["a, 5, to the first token"] == "slower" == verdicts["a, 5, to the exit"]
        assert verdicts["b, 5, to the first token"] == "faster"
        assert verdicts["c, 5, to the first token"] == "same" == verdicts["floor, to the first token"]

    def test_a_slower_machine_is_not_a_slower_program(self):
        old = [starts("floor", noisy(80, 1), tokens=None), starts("a", noisy(100, 2))]
        new = [starts("floor", noisy(100, 3), tokens=None), starts("a", noisy(120, 4))]
        verdicts = found(old, new)
        assert verdicts["floor, to the first token"] == "slower"
        assert verdicts["a, 5, to the first token"] == "same"

    def test_few_runs_say_nothing(self):
        verdicts = found([starts("a", noisy(100, 1, 3))], [starts("a", noisy(200, 2, 3))])
        assert verdicts["a, 5, to the first token"] == "too few"

    def test_noise_is_rarely_called_slower(self):
        """200 comparisons of equal things, each at 2.5%: 5 false alarms are expected."""
        slower = 0
        for seed in range(200):
            verdicts = found([starts("a", noisy(100, 2 * seed))], [starts("a", noisy(100, 2 * seed + 1))])
            slower += "slower" in verdicts.values()
        assert slower <= 10

    def test_energy(self):
        verdict = {}
        for new in (45.9, 46.2, 43.0):
            [finding] = compare.compare(
                [document("energy", [joules("a", 45.0)])], [document("energy", [joules("a", new)])]
            )
            verdict[new] = finding.verdict
        assert verdict == {45.9: "same", 46.2: "slower", 43.0: "faster"}

    def test_command(self, tmp_path: Path):
        for name, median in (("old", 100), ("new", 120)):
            measure.save(tmp_path / f"{name}.json", document("coldstart", [starts("a", noisy(median, median))]))
        command = [sys.executable, ROOT / "bench" / "compare.py", tmp_path / "old.json", tmp_path / "new.json"]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 1 and result.stdout.startswith(
            "slower   coldstart, held, warm, s.gguf, a, 5, to the"
        )
        assert subprocess.run([*command[:3], tmp_path / "old.json"], capture_output=True).returncode == 0


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

    def test_device(self, tmp_path: Path):
        """Everything, as far as it goes without a GPU: the floor runs, what cannot be had is listed."""
        shape = ["--models", "qwen3-0.6b", "--target", "none", "--only", "back-to-back", "--limit", "8"]
        command = [
            sys.executable,
            ROOT / "bench" / "device.py",
            tmp_path / "out",
            "--folder",
            tmp_path / "models",
            *shape,
        ]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert result.returncode == 0, result.stderr
        saved = json.loads((tmp_path / "out" / "coldstart-back-to-back.json").read_text())
        [row] = [row for row in saved["rows"] if row["contender"] == "floor"]
        assert row["n"] >= 1 and min(row["first_ms"]) >= 60
        assert {"contender": "ollama", "why": "no ollama on this machine"} in saved["not_run"]
        assert any(each["contender"].startswith("reflex") for each in saved["not_run"])
        assert saved["models"][0]["sha256"] == measure.sha256(tmp_path / "models" / "qwen3-0.6b-Q4_K_M.gguf")
        (tmp_path / "models" / "qwen3-0.6b-Q4_K_M.gguf").unlink()


def test_a_part_that_fails_does_not_end_the_others(tmp_path: Path):
    session = device.Session(tmp_path, 60)
    done = []

    def fails() -> None:
        raise MeasurementError("not here")

    session.part("first", fails)
    session.part("second", done.append, 1)
    session.until = time.monotonic() - 1
    session.part("third", done.append, 2)
    assert done == [1]
    assert session.absent == [
        {"contender": "first", "why": "not here"},
        {"contender": "third", "why": "no time was left"},
    ]
