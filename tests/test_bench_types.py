"""Products with weights of every type: as launches on a driver that computes nothing, and right where the emulated
device can show it; what becomes of the figures."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import emulator
import numpy as np
import pytest
from emulator.build import library as emulated
from fakecuda import ROOT, library

sys.path.append(str(ROOT / "bench"))  # behind tests/, which has a wire.py of its own

import collect
import compare
import measure
import rare_types
import report

from reflex_ipc.cuda import launch
from reflex_ipc.cuda.formats import FORMATS, RARE
from reflex_ipc.reference.dequant import DEQUANTISERS, dequantise

KERNELS = Path(launch.LIB) / "sm_90a" / "kernels.txt"
needs_kernels = pytest.mark.skipif(not KERNELS.exists(), reason="the kernels are not built: kernels/build.py all")


def run(
    out: Path, *arguments: Any, **environment: str
) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
    command = [sys.executable, ROOT / "bench" / "rare_types.py", out, "--n-out", "32", "--rounds", "2", "--beyond", "1"]
    environment |= {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [*command, *map(str, arguments)], env=environment, capture_output=True, text=True, timeout=120
    )
    file = out / "types.json"
    return done, json.loads(file.read_text())["rows"] if file.exists() else []


def test_every_type_of_the_reference():
    assert FORMATS.keys() == DEQUANTISERS.keys()


@pytest.mark.parametrize("kind", FORMATS)
def test_weights_are_numbers_of_some_size(kind: str):
    """Else an error would say nothing."""
    values = dequantise(rare_types.weights(kind, 16), kind, 16 * rare_types.N_IN)
    assert np.isfinite(values).all() and 1e-5 < np.abs(values).max() < 1e4
    assert np.count_nonzero(values) > len(values) / 4


@needs_kernels
def test_every_type_and_count_is_launched(tmp_path: Path):
    """What they compute cannot be right there, and is said to be wrong."""
    done, rows = run(tmp_path, "--library", library(), FAKECUDA_KERNELS=str(KERNELS))
    assert done.returncode == 1 and done.stdout.endswith("largest error nan\n"), done.stderr
    assert [(row["type"], row["rows"]) for row in rows] == [(kind, m) for kind in FORMATS for m in (1, 40, 128)]
    assert all(len(row["seconds"]) == 2 and row["rare"] == (row["type"] in RARE) for row in rows)
    assert {row["type"]: row["bytes"] for row in rows}["Q4_K"] == 32 * 4096 // 256 * 144


@needs_kernels
def test_products_are_right(tmp_path: Path):
    lib = emulator.kernels(KERNELS, tmp_path / "emulated")
    arguments = ["--library", emulated(KERNELS), "--kernels", lib, "--counts", "17", "--types", "Q3_K", "IQ3_S", "BF16"]
    done, rows = run(tmp_path, *arguments)
    assert done.returncode == 0, done.stderr
    assert [row["type"] for row in rows] == ["Q3_K", "IQ3_S", "BF16"]
    assert all(0 < row["error"] < 5e-4 for row in rows)


def row(kind: str, m: int, *microseconds: float) -> dict[str, Any]:
    of = {"type": kind, "rare": kind in RARE, "bits": rare_types.bits(kind), "bytes": 10**6, "error": 1e-4}
    return {**of, "rows": m, "seconds": [us / 1e6 for us in microseconds]}


def test_what_rare_types_are_held_against():
    """The fast type nearest in bits, of several the fastest, by medians; of the same count of rows."""
    rows = [row("Q2_K", 1, 10, 10, 90), row("Q4_0", 1, 20), row("Q4_K", 1, 16), row("F16", 1, 60), row("Q4_K", 40, 1)]
    rows += [row("IQ2_S", 1, 25), {**row("NVFP4", 1, 24), "rare": True}]
    rare_types.compared(rows)
    assert not any("nearest" in each for each in rows[:5])
    assert [(each["nearest"], each["against_nearest"], each["against_median"]) for each in rows[5:]] == [
        ("Q2_K", pytest.approx(2.5), pytest.approx(25 / 18)),
        ("Q4_K", pytest.approx(1.5), pytest.approx(24 / 18)),
    ]


def test_the_page(tmp_path: Path):
    """Through the same tools as other results, though of no model."""
    rows = [row("Q2_K", 1, 10), row("Q2_K", 40, 20), row("IQ2_S", 1, 25), row("IQ2_S", 40, 30)]
    rare_types.compared(rows)
    content = {"models": [], "n_in": 4096, "n_out": 12288, "bound": 3.0, "rows": rows, "not_run": []}
    measure.save(tmp_path / "in.json", measure.document("types", content))
    whole, said = collect.collect(collect.read(tmp_path / "in.json"))
    assert [*whole] == ["types"] and said == ["types: new"]
    page, _ = report.page([*whole.values()], "p", "p")
    assert "largest ratio is 2.50, of IQ2_S at M = 1; the bound is 3." in page
    assert "takes 2.50, 1.50 times as long at M = 1, 40." in page
    assert "| IQ2_S | 2.56 | generic | 25.0 | 30.0 | 40 | 33 | 2.50, Q2_K | 1.50, Q2_K |" in page
    assert ("types", "IQ2_S", "40") in compare.by_key([*whole.values()])
    page, _ = report.page(
        [{**whole["types"], "rows": rows[:2]}], "p", "p"
    )  # no rare type, and nothing that one is held to
    assert "| Q2_K | 2.62 | fast | 10.0 | 20.0 | 100 | 50 |\n" in page and "nearest" not in page
