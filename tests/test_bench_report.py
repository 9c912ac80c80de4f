"""What is made of measurements: statistics against Python's own, the page, the comparison of two results."""

import itertools
import json
import random
import re
import statistics
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakecuda import ROOT

sys.path.append(str(ROOT / "bench"))  # behind tests/, which has a wire.py of its own

import compare
import measure
import report
import svg
from measure import MeasurementError


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
    decision = {
        "what": "score",
        "prompt_tokens": 30,
        "candidates": 3,
        "seconds": [0.003, 0.002, 0.004],
        "inside_s": [0.0015] * 3,
    }
    return [
        document("coldstart", rows),
        document("energy", [joules("floor", 40.0), joules("reflex", 45.0)]),
        document("warm", [warm], rates=RATES, backend="cuda"),
        document("stdio", [decision], backend="cuda"),
    ]


class TestReport:
    def test_page(self, tmp_path: Path):
        for i, result in enumerate(results()):
            measure.save(tmp_path / "in" / f"{i}.json", result)
        command = [sys.executable, ROOT / "bench" / "report.py", tmp_path / "in", "--out", tmp_path / "page.md"]
        subprocess.run(command, check=True, capture_output=True)
        page = (tmp_path / "page.md").read_text()
        assert page.index("[`in/`](in)") < page.index("## ") and "since" not in page
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
        assert "| score | 3 | 2.00 | 3.00 | 3.80 | 4.00 |" in page and "| score, inside | 3 | 1.50 |" in page
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

    def test_what_was_measured_again_has_a_page_of_its_own(self, tmp_path: Path):
        """Each says so of the other. Where the whole is as new, nothing is newer."""
        measure.save(tmp_path / "in" / "0.json", results()[0])
        newer = {**results()[0], "when": "2999-01-01T00:00:00.000Z"}
        newer["source"] = {**newer["source"], "sources_sha256": "ef" * 32}
        measure.save(tmp_path / "in" / "since" / "0.json", newer)
        command = [sys.executable, ROOT / "bench" / "report.py", tmp_path / "in", "--out", tmp_path / "page.md"]
        subprocess.run(command, check=True, capture_output=True)
        whole, again = (tmp_path / "page.md").read_text(), (tmp_path / "page" / "since.md").read_text()
        assert "[since.md](page/since.md)" in whole[: whole.index("## ")] and "efef" not in whole
        assert "[all of it](../page.md)" in again[: again.index("## ")] and "efef" in again
        pictures = re.findall(r"\]\((since/[^)]+svg)\)", again)
        assert pictures and all((tmp_path / "page" / name).exists() for name in pictures)
        measure.save(tmp_path / "in" / "since" / "0.json", results()[0])
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 1 and "since is no newer than" in done.stderr

    def test_a_decision_beside_a_token(self):
        """Of one state and prompt; the difference of the medians is not the median of the differences."""
        rows = [starts("reflex", [100.0, 90.0, 80.0]), starts("reflex", [300.0] * 3, tokens=512)]
        rows += [starts("reflex system1", [101.0, 98.0, 87.0]), starts("reflex", [70.0] * 3, "l.gguf")]
        rows += [starts("reflex system1", [1.0] * 3, state="idle")]
        page, _ = report.page([document("coldstart", rows)], "p", "p")
        section = page.split("### A decision\n")[1].split("###")[0]
        assert "| s.gguf | held | 5 | 3 | 90.0 | 98.0 | +8.0 | +7.0 |" in section and section.count("gguf") == 1

    def test_a_cold_cache_beside_the_disk_alone(self):
        """The faster way counts, by its median: 0.4 GB in 200 ms are 2 GB/s."""
        cold = {"state": "back-to-back", "cache": "cold"}
        rows = [starts("floor", [300.0] * 3, tokens=None, **cold), starts("reflex", [150.0, 210.0, 400.0], **cold)]
        rows += [starts("disk, direct", [100.0, 250.0, 260.0], tokens=None, **cold)]
        rows += [starts("disk, buffered", [190.0, 200.0, 220.0], tokens=None, **cold)]
        page, _ = report.page([document("coldstart", rows)], "p", "p")
        assert "counts: 2.00 GB/s (s.gguf)." in page
        cells = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| s.gguf | ")]
        times = {"floor": "1.50", "reflex": "1.05", "disk, direct": "1.25", "disk, buffered": "1.00"}
        assert {line[1]: line[-1] for line in cells if len(line) == 10} == times
        rows = [row for row in rows if "disk" not in row["contender"]]
        page, _ = report.page([document("coldstart", rows)], "p", "p")
        assert "disk alone, in" not in page and "| +0.0 ms, 1.00 | - |" in page

    def test_models_by_size_and_states_in_order(self):
        rows = [starts("reflex", [9.0] * 3, "l.gguf"), starts("reflex", [8.0] * 3, "l.gguf", state="idle")]
        large, small = document("coldstart", rows), document("coldstart", [starts("reflex", [7.0] * 3)])
        large["models"], small["models"] = large["models"][1:], small["models"][:1]
        page, _ = report.page([large, small], "p", "p")
        assert [line for line in page.splitlines() if line.startswith("### ")][:2] == [
            *("### Idle, page cache warm", "### Held, page cache warm"),
        ]
        assert page.index("| s.gguf | reflex") < page.rindex("| l.gguf | reflex")

    @pytest.mark.parametrize(
        "xs", [(0.397, 5.03, 10.4, 18.6, 21.2), (1, 1.01, 1.02, 1.03, 99999), (5, 128, 512, 2048), (7,)]
    )
    def test_words_of_a_plot_avoid_each_other(self, xs: tuple[float, ...]):
        """And stay within it, by their width at most."""
        names = ["reflex, qwen3.5-35b-a3b-Q4_K_M.gguf", *(f"contender {i}" for i in range(22))]
        plot = svg.lines(
            "t", "model file, GB", "ms", {name: [(x, 5.0 + i) for x in xs] for i, name in enumerate(names)}
        )
        tree = ElementTree.fromstring(plot)
        width, height = float(tree.get("width", "0")), float(tree.get("height", "0"))
        boxes = []
        for text in tree.iter("{http://www.w3.org/2000/svg}text"):
            size = len(text.text or "") * 7.2  # of a common font, at 13 pixels
            x, y = float(text.get("x", "0")), float(text.get("y", "0"))
            x -= {"start": 0.0, "middle": size / 2, "end": size}[text.get("text-anchor", "")]
            boxes.append((x, x + size, y - 10, y + 3, text.text))
        assert len(boxes) >= len(xs) + len(names) + 3
        for a, b in itertools.combinations(boxes, 2):
            assert a[1] <= b[0] or b[1] <= a[0] or a[3] <= b[2] or b[3] <= a[2], (a, b)
        assert all(x0 >= 0 and x1 <= width and y1 <= height for x0, x1, _, y1, _ in boxes)

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
                report.page([first, second], "p", "p")

    def test_no_row_twice(self):
        with pytest.raises(MeasurementError, match=r"two results for coldstart, held, warm, s\.gguf, floor"):
            report.page([results()[0], results()[0]], "p", "p")

    def test_what_is_no_result_is_refused(self, tmp_path: Path):
        whole = json.dumps(results()[0])
        for text, why in (
            ('{"schema": 2}', "is no result"),
            (whole[: len(whole) // 2], "is no result"),
            (whole.replace('"schema": 1', '"schema": 0'), "schema 0, kind 'coldstart'"),
            (whole.replace('"rows"', '"old rows"'), "rows: is missing"),
            (json.dumps({**results()[0], "rows": [{**results()[0]["rows"][0], "first_ms": [0.0]}]}), "first_ms"),
        ):
            (tmp_path / "x.json").write_text(text)
            with pytest.raises(MeasurementError, match=why):
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

    def test_a_slower_machine_seldom_is_called_a_slower_program(self):
        """Of 60 comparisons on a machine that became 20 ms slower, whose floor scatters as the program does, few more
        than the promised 5% may be wrong; a program that is 20 ms slower besides is named."""
        rng = random.Random(11)

        def side(machine: float, program: float) -> list[dict[str, Any]]:
            def runs(median: float) -> list[float]:
                return [median + rng.lognormvariate(2, 0.6) for _ in range(20)]

            return [
                starts("floor", runs(200 + machine), tokens=None),
                *(starts("a", runs(200 + machine + program), tokens=n) for n in (5, 128, 512)),
            ]

        def n_named(program: float) -> list[int]:
            sides = [(side(0, 0), side(20, program)) for _ in range(60)]
            return [sum(verdict == "slower" for verdict in found(*each).values()) for each in sides]

        assert sum(n > 0 for n in n_named(0)) <= 5
        assert sum(n_named(20)) >= 0.95 * 60 * 3

    def test_other_machines_and_files_are_said(self):
        old, new = document("coldstart", [starts("a", [1.0] * 9)]), document("coldstart", [starts("a", [1.0] * 9)])
        new["machine"] = {**new["machine"], "cpu": "another"}
        new["models"] = [{**entry, "sha256": "7e" * 32} for entry in new["models"]]
        others = [finding for finding in compare.compare([old], [new]) if finding.verdict == "other"]
        assert [finding.row for finding in others] == ["machine", *(entry["file"] for entry in old["models"])]
        assert "another" in others[0].detail and compare.compare([old], [old])[0].verdict == "same"

    def test_a_slower_machine_is_not_a_slower_program(self):
        old = [starts("floor", noisy(80, 1), tokens=None), starts("a", noisy(100, 2))]
        new = [starts("floor", noisy(100, 3), tokens=None), starts("a", noisy(120, 4))]
        verdicts = found(old, new)
        assert verdicts["floor, to the first token"] == "other"
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
