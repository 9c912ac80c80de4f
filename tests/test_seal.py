"""What was verified on a device is what is here, or said not to be."""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fakecuda import library

import seal


def test_the_sources_are_verified_or_named_as_pending():
    assert seal.Seal().problem() is None


def test_what_the_readme_says_was_left_out():
    """Of the sealed runs: the tests of SmolLM2, and no others."""
    runs = json.loads(seal.Seal().verified_path.read_text())["runs"]
    left_out = {name.partition("::")[0] for run in runs.values() for names in run["skipped"].values() for name in names}
    readme = " ".join((seal.ROOT / "README.md").read_text().split())
    assert left_out <= {"tests/gpu/test_smollm2.py"}
    assert ("but for those of SmolLM2" in readme) == bool(left_out)


FAULTS = {
    "test_device.py": {"test_upload", "test_a_file_that_cannot_be_read", "test_two_hundred_openings_leave_nothing"},
    "test_lifetime.py": {
        "test_two_hundred_models_opened_and_closed",
        "test_two_hundred_openings_of_one_process_take_no_device_memory",
        "test_killed_at_each_phase",
        "test_killed_in_the_middle_of_the_upload",
    },
}
"""What may go wrong under a model, on a device: a file that shrinks or cannot be read, leaks, kill -9."""


@pytest.mark.parametrize("name", FAULTS)
def test_tests_of_faults_are_there_and_cannot_skip(name: str):
    module = ast.parse((seal.ROOT / "tests" / "gpu" / name).read_text())
    functions = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}
    assert FAULTS[name] <= functions.keys()
    conftest = ast.parse((seal.ROOT / "tests" / "gpu" / "conftest.py").read_text())
    fixtures = [
        node for node in conftest.body if isinstance(node, ast.FunctionDef) and node.name in ("device", "kernels")
    ]
    module_marks = [node for node in module.body if isinstance(node, ast.Assign)]
    for node in [*(functions[each] for each in FAULTS[name]), *fixtures, *module_marks]:
        assert "skip" not in ast.unparse(node)


@pytest.fixture
def tree(tmp_path: Path) -> seal.Seal:
    for name in (
        "kernels/a.cu", "kernels/native/b.c", "reflex_ipc/cuda/c.py", "reflex_ipc/cuda/lib/manifest.json",
        "reflex_ipc/archs/d.py", "reflex_ipc/plan.py", "reflex_ipc/engine.py", "reflex_ipc/other.py",
    ):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return seal.Seal(tmp_path)


def test_what_is_vouched_for(tree: seal.Seal):
    assert list(tree.hashes()) == [
        "kernels/a.cu", "kernels/native/b.c", "reflex_ipc/archs/d.py", "reflex_ipc/cuda/c.py", "reflex_ipc/engine.py",
        "reflex_ipc/plan.py",
    ]  # fmt: skip


def test_the_life_of_a_seal(tree: seal.Seal):
    assert "no device has verified kernels/a.cu, kernels/native/b.c" in (tree.problem() or "")
    tree.write_pending("no device could be had")
    assert tree.problem() is None
    assert tree.status()["state"] == "pending" and tree.status()["why"] == "no device could be had"
    tree.record("cubin", ["test_b", "test_a"], "H200", "580")
    assert tree.missing_runs() == ["ptx"] and tree.problem() is None  # still named as pending
    tree.record("ptx", ["test_a"], "H200", "580", {"test_d": "no model", "test_b": "no model", "test_c": "too old"})
    assert not tree.pending_path.exists() and tree.problem() is None
    runs = {
        "cubin": {"passed": 2, "skipped": {}},
        "ptx": {"passed": 1, "skipped": {"no model": 2, "too old": 1}},
    }
    assert tree.status() == {"state": "verified", "device": "H200", "driver": "580", "runs": runs}
    sealed = json.loads(tree.verified_path.read_text())["runs"]["ptx"]
    assert sealed["skipped"] == {"no model": ["test_b", "test_d"], "too old": ["test_c"]}
    assert json.loads(tree.verified_path.read_text())["runs"]["cubin"]["tests"] == ["test_a", "test_b"]

    (tree.root / "reflex_ipc/other.py").write_text("changed")
    assert tree.problem() is None
    (tree.root / "kernels/a.cu").write_text("changed")
    (tree.root / "kernels/new.cuh").write_text("new")
    (tree.root / "reflex_ipc/plan.py").unlink()
    assert tree.changed() == ["kernels/a.cu", "kernels/new.cuh", "reflex_ipc/plan.py"]
    assert "kernels/new.cuh" in (tree.problem() or "")
    tree.write_pending("the device is being repaired")
    assert tree.problem() is None
    assert json.loads(tree.pending_path.read_text())["files"] == tree.changed()
    (tree.root / "reflex_ipc/engine.py").write_text("changed too")
    assert "no device has verified reflex_ipc/engine.py" in (tree.problem() or "")
    # A run on changed files starts over.
    tree.record("ptx", ["test_a"], "H200", "580")
    assert tree.missing_runs() == ["cubin"]
    assert tree.changed() == [] and tree.status()["state"] == "pending"
    tree.record("cubin", ["test_a"], "H200", "580")
    assert tree.problem() is None


def test_a_pending_file_that_is_out_of_date_or_silent(tree: seal.Seal):
    for run in seal.RUNS:
        tree.record(run, ["test_a"], "H200", "580")
    tree.write_pending("why")
    tree.pending_path.write_text(json.dumps({"why": "x", "files": ["kernels/a.cu"]}))
    assert "names what is verified: kernels/a.cu" in (tree.problem() or "")
    (tree.root / "kernels/a.cu").write_text("changed")
    tree.pending_path.write_text(json.dumps({"why": " ", "files": ["kernels/a.cu"]}))
    assert "does not say why" in (tree.problem() or "")
    tree.verified_path.unlink()
    tree.pending_path.unlink()
    (tree.root / "reflex_ipc/plan.py").unlink()
    tree.record("cubin", ["test_a"], "H200", "580")
    assert tree.problem() == "the device suite has not run with ptx on these files"


RUN = """
import sys
from pathlib import Path
import pytest, seal
from reflex_ipc import backends
backends.DEVICE_NODES = ("/dev/null",)
seal.Seal.__init__.__defaults__ = (Path.cwd(),)
sys.exit(pytest.main(["-q", "-m", "gpu", *sys.argv[1:]]))
"""
TESTS = """
import os, pytest
def test_one(device): assert device.name == "Fake 0"
def test_two(device): assert "BREAK" not in os.environ
def test_three(): pytest.skip("no model")
"""


def test_only_a_whole_run_is_sealed(tree: seal.Seal) -> None:
    """By the real conftest, on a driver that is none: whatever makes a run smaller, it vouches for nothing."""
    gpu, lib = tree.root / "tests" / "gpu", tree.root / "lib"
    gpu.mkdir(parents=True)
    lib.mkdir()
    (lib / "libcuda.so.1").symlink_to(library())
    shutil.copy(seal.ROOT / "tests" / "gpu" / "conftest.py", gpu)
    (tree.root / "pytest.ini").write_text("[pytest]\ntestpaths = tests\nmarkers = gpu\n")
    for name in ("test_a.py", "test_b.py"):
        (gpu / name).write_text(TESTS)
    paths = os.pathsep.join(map(str, (seal.ROOT, seal.ROOT / "kernels")))
    env = {**os.environ, "PYTHONPATH": paths, "LD_LIBRARY_PATH": str(lib)}

    def run(*options: str, **more: str) -> int:
        command = [sys.executable, "-c", RUN, *options]
        return subprocess.run(command, cwd=tree.root, env=env | more, capture_output=True, check=False).returncode

    a, two = "tests/gpu/test_a.py", "tests/gpu/test_a.py::test_two"
    assert run(BREAK="1") == 1 and not tree.verified_path.exists()
    for options in (
        ["--lf"],
        ["--deselect", two],
        ["--ignore", a],
        ["-k", "not two"],
        [a],
        [two],
        [two, "tests/gpu/test_b.py"],
    ):
        assert run(*options) == 0 and not tree.verified_path.exists(), options
    assert run() == 0
    sealed = json.loads(tree.verified_path.read_text())["runs"]["cubin"]
    assert len(sealed["tests"]) == 4 and {why: len(names) for why, names in sealed["skipped"].items()} == {
        "no model": 2
    }


def test_the_command(tree: seal.Seal, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(seal, "Seal", lambda: tree)
    assert seal.main([]) == 1
    assert seal.main(["pending", "no device"]) == 0
    assert seal.main([]) == 0
    assert '"why": "no device"' in capsys.readouterr().out
    assert seal.main(["what"]) == 2
