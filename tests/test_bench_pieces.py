"""Measurements in pieces: what a call will take, and several calls' results as one set."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
from fakecuda import ROOT, library

sys.path.append(str(ROOT / "bench"))  # behind tests/, which has a wire.py of its own

import collect
import compare
import contenders
import device
import families
import measure
import models
from measure import MeasurementError

GPU = {"name": "H", "driver": "580.1", "cuda": "13.0", "persistence": 1, "pcie_generation": 5, "pcie_width": 16}


def row(contender: str, runs: list[float], state: str = "idle", model: str = "m.gguf", **more: Any) -> dict[str, Any]:
    return {
        "state": state,
        "cache": "warm",
        "model": model,
        "contender": contender,
        "prompt_tokens": 5,
        "command": ["run", model],
        "env": {},
        "n": len(runs),
        "first_ms": runs,
        "exit_ms": [run + 100 for run in runs],
        "output": "x",
        **more,
    }


def result(when: str, rows: list[dict[str, Any]], kind: str = "coldstart", **more: Any) -> dict[str, Any]:
    files = dict.fromkeys(row.get("model", "m.gguf") for row in rows) or {"m.gguf": None}
    return {
        "schema": 1,
        "kind": kind,
        "when": when,
        "command": ["bench/device.py", "OUT", when],
        "source": {"commit": None, "changed": None, "sources_sha256": "a" * 64},
        "machine": {
            "gpu": GPU,
            "cpu": "C",
            "cores": 16,
            "memory_bytes": 1,
            "kernel": "6",
            "python": "3.12",
            "driver_environment": {},
        },
        "models": [{"file": file, "bytes": 10**9, "sha256": "b" * 64} for file in files],
        "rows": rows,
        "not_run": [],
        **more,
    }


JOULES: dict[str, Any] = {
    "batch_s": 10.0,
    "idle_before_w": 70.0,
    "idle_after_w": 70.0,
    "gross_j": 50.0,
    "gross_error_j": 0.5,
    "net_j": None,
    "net_error_j": 1.0,
}
"""What a row of energy has besides."""


def write(folder: Path, **documents: dict[str, Any]) -> Path:
    folder.mkdir()
    for name, document in documents.items():
        (folder / f"{name}.json").write_text(json.dumps(document))
    return folder


def run(*arguments: Any, code: int = 0) -> str:
    command = [sys.executable, ROOT / "bench" / "collect.py", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def by_key(folder: Path) -> dict[tuple[str, ...], Any]:
    return compare.by_key(compare.load(folder))


def test_pieces_become_one_set_and_a_page(tmp_path: Path):
    """Two calls of one state for two models, under one name; a third that goes on with the first; a file of another
    kind; one call as an archive."""
    cut = "idle, warm cache: 2 of 4 rounds, then the time was up"
    first = result("1", [row("floor", [1.0, 2.0]), row("reflex", [3.0, 4.0])])
    of = {"state": "idle", "cache": "warm", "model": "m.gguf"}

    def cut_part(part: str, *names: str) -> dict[str, Any]:
        asked = {"reason": "no time", "part": part, "models": [*names]}
        return {"contender": f"{part}, {names[0]}", "why": "no time was left", **asked}

    first["not_run"] = [
        {"contender": "floor", "why": cut, "reason": "no time", "kind": "coldstart", "of": of, "asked": 4, "done": 2},
        {"contender": "more", "why": cut, "reason": "no time", "kind": "coldstart", "of": of, "asked": 5, "done": 2},
        cut_part("held", "m", "l"),
        cut_part("idle", "k"),
        cut_part("cold", "m"),
        cut_part("back-to-back", "m"),
        {"contender": "before", "why": "no time was left"},
        {"contender": "before, rounds", "why": cut, "of": "idle, warm, m.gguf"},
        {"contender": "ollama", "why": "no ollama on this machine"},
    ]
    one = write(tmp_path / "one", coldstart=first)
    held = result("2", [row("reflex", [5.0, 6.0], "held"), row("reflex", [7.0, 8.0], "held", "l.gguf")])
    cold = result("2", [row("reflex", [9.0], "back-to-back", cache="cold")])
    two = write(tmp_path / "two", coldstart=held, cold=cold)
    again = result("3", [row("floor", [9.0, 10.0]), row("reflex", [11.0, 12.0])])
    three = write(tmp_path / "three", coldstart=again)
    archive = tmp_path / "three.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(three, "anywhere/three")
    into = tmp_path / "into"
    said = run(into, one, two, archive)
    names = ["coldstart-back-to-back-cold-m", "coldstart-held-warm-l", "coldstart-held-warm-m", "coldstart-idle-warm-m"]
    assert sorted(path.stem for path in into.iterdir()) == names
    assert "coldstart-idle-warm-m: put together with what was there" in said
    rows = by_key(into)
    assert rows["coldstart", "idle", "warm", "m.gguf", "floor", "5"]["first_ms"] == [1.0, 2.0, 9.0, 10.0]
    reflex = rows["coldstart", "idle", "warm", "m.gguf", "reflex", "5"]
    assert (reflex["n"], reflex["first_ms"], reflex["exit_ms"]) == (4, [3, 4, 11, 12], [103, 104, 111, 112])
    assert rows["coldstart", "held", "warm", "l.gguf", "reflex", "5"]["first_ms"] == [7.0, 8.0]
    # What was cut short and was done since is no longer listed; what nobody did is.
    left = [each["contender"] for document in compare.load(into) for each in document["not_run"]]
    assert left == ["more", "idle, k", "back-to-back, m", "before", "before, rounds", "ollama"]
    # The same again changes nothing, whether it comes at once or later.
    before = {path.name: path.read_bytes() for path in into.iterdir()}
    assert "there already" in run(into, archive, one, two, three)
    assert {path.name: path.read_bytes() for path in into.iterdir()} == before
    between = write(tmp_path / "between", a=result("2.5", [row("reflex", [13.0])]))
    run(into, between, one)
    assert by_key(into)["coldstart", "idle", "warm", "m.gguf", "reflex", "5"]["first_ms"] == [3, 4, 11, 12, 13]
    page = tmp_path / "page.md"
    report = [sys.executable, ROOT / "bench" / "report.py", into, "--out", page]
    assert subprocess.run(report, capture_output=True, text=True).returncode == 0
    assert "| m.gguf | reflex | 5 | 5 | 3.0 | 11.0 |" in page.read_text()


def asked(folder: Path, when: str, seconds: list[float], backend: str = "cuda", **more: Any) -> Path:
    """A piece of requests behind a pipe."""
    later = {"what": "first token", "prompt_tokens": 30, "seconds": [9.0]}
    decision = {"what": "score", "prompt_tokens": 30, "candidates": 3, "seconds": seconds, **more}
    return write(folder / when, a={**result(when, [decision, later], "stdio"), "backend": backend})


def test_requests_of_two_pieces_are_one_row(tmp_path: Path):
    pieces = asked(tmp_path, "2", [3.0, 4.0], inside_s=[3.0]), asked(tmp_path, "1", [1.0, 2.0], inside_s=[1.0])
    run(tmp_path / "into", *pieces)
    score, first = by_key(tmp_path / "into").values()
    assert (score["seconds"], score["inside_s"], first["seconds"]) == ([1.0, 2.0, 3.0, 4.0], [1.0, 3.0], [9.0, 9.0])


@pytest.mark.parametrize("inside", [(None, [0.5]), ([0.5], None)])
def test_requests_of_which_one_piece_knows_less(tmp_path: Path, inside: tuple[list[float] | None, list[float] | None]):
    pieces = [
        asked(tmp_path, when, [1.0], **({} if known is None else {"inside_s": known}))
        for when, known in zip(("1", "2"), inside, strict=True)
    ]
    run(tmp_path / "into", *pieces)
    score, _ = by_key(tmp_path / "into").values()
    assert (score["seconds"], score["inside_s"]) == ([1.0, 1.0], [0.5])


@pytest.mark.parametrize("inside", [None, 5, "ab", ["a"], []])
def test_requests_whose_time_inside_is_none(tmp_path: Path, inside: Any):
    piece = asked(tmp_path, "1", [1.0], inside_s=inside)
    assert "rows[0].inside_s: has to be a list of times above 0" in run(tmp_path / "into", piece, code=1)


def test_requests_of_another_backend_are_no_more_of_the_same(tmp_path: Path):
    said = run(tmp_path / "into", asked(tmp_path, "1", [1.0]), asked(tmp_path, "2", [20.0], "cpu"))
    assert "newer, in place of what was there" in said
    (document,) = compare.load(tmp_path / "into")
    assert (document["backend"], document["rows"][0]["seconds"]) == ("cpu", [20.0])


def test_requests_with_prompts_of_two_lengths_are_told_apart(tmp_path: Path):
    run(tmp_path / "into", asked(tmp_path, "1", [1.0]), asked(tmp_path, "2", [2.0], prompt_tokens=512))
    page = tmp_path / "page.md"
    subprocess.run([sys.executable, ROOT / "bench" / "report.py", tmp_path / "into", "--out", page], check=True)
    said = page.read_text()
    assert "a fresh prompt of 30 or 512 tokens each" in said
    assert "| score, prompt of 30 | 1 | 1000.00 |" in said and "| score, prompt of 512 | 1 | 2000.00 |" in said


def test_pieces_that_end_within_a_second_are_two(monkeypatch: pytest.MonkeyPatch):
    for what in ("source", "machine"):
        monkeypatch.setattr(measure, what, lambda *_: {})
    first = measure.document("stdio", {})["when"]
    time.sleep(0.002)
    assert first < measure.document("stdio", {})["when"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first)


def test_energy_that_another_piece_has_is_no_longer_missing():
    energy = {"contender": "reflex", "model": "m.gguf", "state": "back-to-back", "cache": "warm", "prompt_tokens": 5}
    of = {key: energy[key] for key in ("contender", "model", "prompt_tokens")}
    absent = {"contender": "reflex", "why": "", "reason": "no time", "kind": "energy", "asked": 20, "done": 0}
    for n, n_left in ((21, 1), (19, 2)):
        there = result("2", [{**energy, "n": n}], "energy")
        there["not_run"] = [{**absent, "of": of}, {**absent, "of": {**of, "prompt_tokens": 512}}]
        whole, _ = collect.collect([result("1", [row("reflex", [1.0])]), there])
        assert [len(document["not_run"]) for document in whole.values()] == [0, n_left]


def test_what_was_measured_twice_otherwise_is_the_newer(tmp_path: Path):
    case = {"contender": "reflex", "model": "m.gguf", "state": "back-to-back", "cache": "warm", "prompt_tokens": 5}
    energy = {**JOULES, **case}
    old = write(
        tmp_path / "old",
        a=result("1", [{**energy, "n": 20, "gross_j": 50.0}], "energy"),
        b=result("1", [row("reflex", [1.0])]),
    )
    new = write(
        tmp_path / "new",
        a=result("2", [{**energy, "n": 20, "gross_j": 60.0}], "energy"),
        b=result("2", [row("reflex", [2.0], command=["run", "otherwise"])]),
    )
    said = run(tmp_path / "into", new, old)
    rows = by_key(tmp_path / "into")
    assert [row.get("gross_j", row.get("first_ms")) for row in rows.values()] == [[2.0], 60.0]
    assert "newer, in place of" in said and "of reflex, started by another command, the newer" in said


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d["source"].update(sources_sha256="c" * 64), "different states of the sources"),
        (lambda d: d["machine"].update(gpu={**GPU, "name": "B"}), "different machines"),
        (lambda d: d["models"][0].update(sha256="d" * 64), "two different files are called m.gguf"),
        (lambda d: d.update(schema=7), "is no result of these tools"),
    ],
)
def test_what_does_not_belong_together_is_refused(tmp_path: Path, change: Any, words: str):
    into = write(tmp_path / "into", first=result("1", [row("reflex", [1.0])]))
    other = result("2", [row("reflex", [2.0])])
    change(other)
    call = write(tmp_path / "call", second=other)
    assert words in run(into, call, code=1)
    assert [path.name for path in into.iterdir()] == ["first.json"]
    if "belong" not in words and "tools" not in words:
        run(into, call, "--fresh")
        assert by_key(into)["coldstart", "idle", "warm", "m.gguf", "reflex", "5"]["first_ms"] == [2.0]
        assert [path.name for path in into.iterdir()] == ["coldstart-idle-warm-m.json"]


def test_no_archive_and_no_results(tmp_path: Path):
    (tmp_path / "x.tar.gz").write_bytes(b"none")
    assert "x.tar.gz: " in run(tmp_path / "into", tmp_path / "x.tar.gz", code=1)
    assert "no results" in run(tmp_path / "into", tmp_path / "nowhere", code=1)


TOOLS = sorted(path for path in (ROOT / "bench").glob("*.py") if '__name__ == "__main__"' in path.read_text())


def test_every_tool_ends_through_one_place():
    """But for the process that holds the driver, which has no bench/ to import from."""
    ends = {path.name: "ending.run(" in path.read_text() for path in TOOLS}
    assert [name for name, is_so in ends.items() if not is_so] == ["hold.py"]
    assert {"compare.py", "collect.py", "report.py", "device.py", "warm.py", "rare_types.py"} <= {*ends}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["coldstart.py", "OUT/none", "--out", "OUT/x"], "none"),
        (["coldstart.py", "README.md", "--out", "OUT/x"], "README.md: not a GGUF file"),
        (["coldstart.py", "OUT/empty", "--out", "OUT/x"], "empty: the file is empty"),
        (["coldstart.py", "README.md", "--out", "OUT/x", "--contenders", "OUT/none.toml"], "none.toml"),
        (["energy.py", "README.md", "--out", "OUT/x"], "README.md: not a GGUF file|no NVML"),
        (["warm.py", "README.md", "--out", "OUT/x"], "README.md: not a GGUF file"),
        (["stdio.py", "OUT/none", "--out", "OUT/x"], "none: no such file"),
        (["timeline.py", "./README.md", "--out", "OUT/x", "--backend", "cpu"], "README.md: not a GGUF file"),
        (["models.py", "/proc/self/none", "qwen3-0.6b", "--sparse"], "No such file"),
    ],
    ids=lambda value: "-".join(value[:2]).replace("/", ".") if isinstance(value, list) else "",
)  # fmt: skip
def test_what_cannot_be_is_one_line(tmp_path: Path, arguments: list[str], message: str):
    (tmp_path / "empty").touch()
    words = [word.replace("OUT", str(tmp_path)) for word in arguments[1:]]
    command = [sys.executable, ROOT / "bench" / arguments[0], *words]
    done = subprocess.run(command, capture_output=True, cwd=ROOT, text=True, timeout=60)
    assert done.returncode == 1
    assert re.fullmatch(rf"{arguments[0][:-3]}: .*({message}).*\n", done.stderr)


@pytest.mark.parametrize(
    "arguments",
    [
        ["compare.py", "docs/benchmarks", "docs/benchmarks"],
        ["collect.py", "OUT/in", "docs/benchmarks/stdio-qwen3-8b-Q4_K_M.json"],
        ["report.py", "docs/benchmarks", "--out", "OUT/page.md"],
        ["device.py", "OUT", "--plan"],
        ["families.py", "OUT", "--plan"],
        ["models.py", "OUT/m", "qwen3-0.6b", "--sparse"],
        ["stdio.py", "tests/fixtures/exact/qwen3-f16.gguf", "--out", "OUT/x", "--backend", "cpu", "-n", "1"],
        ["warm.py", "tests/fixtures/exact/qwen3-f16.gguf", "--out", "OUT/x", "--backend", "cpu", "--prefill", "8",
         "--depths", "--score"],
        ["tokenizer.py", "--runs", "1", "tests/fixtures/exact/qwen3-f16.gguf"],
        ["hold.py", str(library())],
    ],
    ids=lambda arguments: "-".join(arguments[:2]).split("/")[0],
)  # fmt: skip
def test_a_reader_who_has_gone(tmp_path: Path, arguments: list[str]):
    """What is printed has nowhere to go, from the first byte on."""
    words = [word.replace("OUT", str(tmp_path)) for word in arguments[1:]]
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, ROOT / "bench" / arguments[0], *words]
    done = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, cwd=ROOT, text=True, timeout=60)
    os.close(writes)
    assert (done.returncode, done.stderr) == (1 if arguments[0] == "hold.py" else 141, "")


def test_the_loop_of_the_wire_answers():
    """bench/wire.py, whose name tests/ has a module of, too: an engine that is a stand-in has to have what is asked of
    it, and a loop that answers nothing is no figure."""
    spec = importlib.util.spec_from_file_location("bench_wire", ROOT / "bench" / "wire.py")
    assert spec is not None and spec.loader is not None
    wire = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(wire)
    assert 0.5 < wire.loop() < 2000


def test_nothing_is_built_where_nothing_can_be_measured(tmp_path: Path):
    (tmp_path / "libcuda.so.1").write_text("none")
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    command = [sys.executable, ROOT / "bench" / "device.py", tmp_path / "out", "--folder", tmp_path / "models"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("device: no NVIDIA driver on this machine") and done.stderr.count("\n") == 1
    assert not [*tmp_path.rglob("*.gguf")]


COMMITTED = sorted((ROOT / "docs" / "benchmarks").rglob("*.json"))
OF_EACH_KIND = {json.loads(path.read_text())["kind"]: path for path in COMMITTED}
NOT_NEEDED = {  # to put results together; a page may need some
    "cores", "memory_bytes", "kernel", "python", "driver_environment", "output", "ready_ms", "inside_s", "candidates",
    "depth", "flops", "first_output_ms", "phases_ms", "device_clock_within_ms",
    "arrivals_late_ms", "disagreements", "trace", "batch_s", "joules", "counter_interval_s", "idle_before_w",
    "idle_after_w", "gross_j", "gross_error_j", "net_j", "net_error_j",
}  # fmt: skip
OPTIONAL = [("pieces",), ("rows", 0, "bytes"), *(("not_run", 0, name) for name in ("reason", "of", "asked", "done"))]


def fields(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all fields of a result, of lists only in their first item."""
    if isinstance(value, dict) and not {"env", "gpu", "trace", "rates", "phases_ms", "driver_environment"} & {*path}:
        return [found for name, each in value.items() for found in [(*path, name), *fields(each, (*path, name))]]
    return fields(value[0], (*path, 0)) if isinstance(value, list) and value else []


@pytest.mark.parametrize("kind", sorted(OF_EACH_KIND))
def test_a_result_that_lacks_something_is_refused_by_field(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Every field in turn is missing, or holds what it must not: a message or a result, and never a file outside."""
    into, call = tmp_path / "deep" / "into", tmp_path / "call.json"
    monkeypatch.setattr(sys, "argv", ["collect.py", str(into), str(call)])
    text = OF_EACH_KIND[kind].read_text()
    for path in fields(json.loads(text)):
        for wrong in (..., None, {}, [], 5, [[]], "../../evil", ["x"]):
            changed = json.loads(text)
            at = changed
            for step in path[:-1]:
                at = at[step]
            if wrong is ...:
                del at[path[-1]]
            else:
                at[path[-1]] = wrong
            call.write_text(json.dumps(changed))
            shutil.rmtree(into.parent, ignore_errors=True)
            code, said = collect.main(), capsys.readouterr()
            if code:
                assert code == 1 and said.err.startswith(f"collect: {call}"), (path, wrong)
                assert path[-1] in said.err or path[-1] in ("schema", "kind", "file"), (path, wrong, said.err)
            else:
                assert wrong is not ... or path[-1] in NOT_NEEDED or path in OPTIONAL, path
                assert {each.name for each in tmp_path.iterdir()} == {"deep", "call.json"}, (path, wrong)
                assert [each.name for each in into.parent.iterdir()] == ["into"], (path, wrong)
                assert all(each.is_file() for each in into.iterdir()), (path, wrong)


def test_fresh_removes_nothing_of_others(tmp_path: Path):
    into = write(tmp_path / "into", old=result("1", [row("reflex", [1.0])]), other={"hello": 1}, list=[1])  # type: ignore[arg-type]
    (into / "half.json").write_text('{"schema": 1')
    call = write(tmp_path / "call", new=result("2", [row("reflex", [2.0])]))
    assert "is no result of these tools" in run(into, call, code=1)
    run(into, call, "--fresh")
    assert sorted(each.stem for each in into.iterdir()) == ["coldstart-idle-warm-m", "half", "list", "other"]
    (into / "coldstart-idle-warm-m.json").write_text("{}")
    assert "in the way" in run(into, call, "--fresh", code=1)
    assert (into / "coldstart-idle-warm-m.json").read_text() == "{}"


def test_the_committed_results_can_be_collected(tmp_path: Path):
    whole, _ = collect.collect(compare.load(ROOT / "docs" / "benchmarks"))
    assert compare.by_key(list(whole.values())).keys() == by_key(ROOT / "docs" / "benchmarks").keys()


def test_the_table_of_families_has_the_rows_it_says(tmp_path: Path):
    """Whatever else was measured, and in which order."""

    def at(what: str, tokens: int, per_second: float, engine: str = "reflex", **more: int) -> dict[str, Any]:
        figures = {"seconds": [1.0], "per_second": per_second, "bytes": 10, "flops": 1}
        return {"engine": engine, "what": what, "tokens": tokens, **figures, **more}

    rows = [
        at("prefill", 128, 1),
        at("prefill", 512, 2),
        at("prefill", 8192, 3),
        at("decode", 128, 4, depth=4096),
        at("decode", 128, 5, depth=128),
        at("decode", 128, 6, depth=8192),
        at("prefill", 512, 7, "llama-bench"),
        at("decode", 128, 8, "llama-bench", depth=128),
    ]
    for order in (rows, rows[::-1]):
        (tmp_path / "warm.json").write_text(json.dumps({"rows": order, "rates": None}))
        found = families.warm(tmp_path / "warm.json")
        assert (found["prefill"]["per_second"], found["decode"]["per_second"]) == (2, 5)


def test_sizes_are_known_beforehand(tmp_path: Path):
    """But for the vocabulary: the estimate and the disk's check stand on it."""
    path = tmp_path / "m.gguf"
    written = models.make(path, "qwen3.5-0.8b", sparse=True)
    assert 0 <= written - models.size("qwen3.5-0.8b") < 16 << 20


def test_a_disk_too_small_is_refused_before_it_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=20 * 10**9)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr(models, "make", lambda *_: pytest.fail("it was begun"))
    with pytest.raises(MeasurementError, match=r"qwen3.5-35b-a3b-Q4_K_M.gguf takes 2\d\.\d GB; .* has 20.0"):
        device.make(device.Session(tmp_path, 10), tmp_path, "qwen3.5-35b-a3b")


def test_plans_fit_a_call():
    """What the documentation gives as one call each stays below nine and a half minutes, with ours and the floor."""
    ours = [contender for contender in contenders.read() if contender.binary is None]
    assert len(ours) == 5
    for parts, names in (
        (["back-to-back", "held", "timeline", "warm", "stdio", "energy"], ["qwen3-0.6b", "qwen3-8b"]),
        (["cold"], ["qwen3-8b"]),
        (["idle"], ["qwen3-0.6b", "qwen3-8b"]),
        (["back-to-back", "held", "timeline", "warm", "stdio", "energy"], ["qwen3-30b-a3b"]),
        (["idle"], ["qwen3-30b-a3b"]),
    ):
        total = float(device.plan(parts, names, 20, ours).split()[-1])
        assert 60 < total < 570, (parts, names)
    assert float(families.plan(families.SHAPES).split()[-2]) < 540
