"""The yardstick of cold starts does what it says, against the fake driver."""

import os
import subprocess
import time
from pathlib import Path

import pytest
from fakecuda import ROOT, library


@pytest.fixture(scope="module")
def floor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("floor") / "floor"
    command = [os.environ.get("CC", "cc"), "-O1", "-Wall", "-Wextra", "-Werror", ROOT / "bench" / "floor.c", "-o", out]
    subprocess.run([*command, "-ldl", "-lpthread"], check=True)
    return out


def test_it_reports_driver_context_and_copy(floor: Path, tmp_path: Path):
    (tmp_path / "libcuda.so.1").symlink_to(library())
    (tmp_path / "file").write_bytes(bytes(9 << 20))
    env = {"LD_LIBRARY_PATH": str(tmp_path), "FAKECUDA_INIT_MS": "100", "FAKECUDA_CONTEXT_MS": "50"}
    for arguments, copies in (([], False), ([tmp_path / "file"], True)):
        began = time.clock_gettime(time.CLOCK_MONOTONIC)
        command = [floor, repr(began), *arguments]
        result = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        driver, context, done = map(float, result.stdout.split())
        assert 100 <= driver <= context - 50 <= done - 50
        assert copies == (done > context)


def test_what_fails_is_said(floor: Path, tmp_path: Path):
    assert subprocess.run([floor], capture_output=True).returncode == 2
    (tmp_path / "libcuda.so.1").symlink_to(library())
    env = {"LD_LIBRARY_PATH": str(tmp_path), "FAKECUDA_FAIL": "cuDevicePrimaryCtxRetain:1:46"}
    result = subprocess.run([floor, "0"], env=env, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (1, "floor: making the context failed: error 46\n")
    missing = subprocess.run([floor, "0", tmp_path / "none"], env=env, capture_output=True, text=True)
    assert (missing.returncode, missing.stderr) == (1, "floor: opening the file failed: error 1\n")
