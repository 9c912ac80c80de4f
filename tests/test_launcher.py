"""bin/reflex in every place an installer puts it, and the driver's early start, against the fake driver."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fakecuda import ROOT, library, native_part

PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"

# Stands in for the package: says how it was started, and when the driver's start was.
MAIN = """\
import ctypes, json, os, sys, time
early = None
for line in open("/proc/self/maps"):
    if line.rstrip().endswith("early.so"):
        from ctypes import CDLL, c_double
        library = CDLL(line[line.index("/"):].rstrip())
        early = (c_double * 5)()
        for _ in range(100):
            library.reflex_early_times(early)
            if early[2]: break
            time.sleep(0.01)
        early = list(early)
        break
child = os.popen("env").read()
print(json.dumps({
    "arguments": sys.argv[1:], "isolated": sys.flags.isolated, "no_site": sys.flags.no_site,
    "file": os.path.realpath(__file__), "executable": sys.executable,
    "early": early, "preload": os.environ.get("LD_PRELOAD"),
    "leaked": [name for name in ("REFLEX_EARLY", "REFLEX_MODEL", "LD_PRELOAD=") if name in child],
}))
"""


@pytest.fixture(scope="module")
def early() -> Path:
    return native_part()


class Place:
    """An installation: `script` in some bin folder, a stand-in package somewhere."""

    def __init__(self, root: Path, early: Path, package: Path | None, device: bool = True) -> None:
        self.root = root
        self.bin = root / "bin"
        self.bin.mkdir(parents=True, exist_ok=True)
        self.script = self.bin / "reflex"
        # A machine with a device has this file; here, one that the test makes stands for it.
        marker = root / "nvidiactl"
        text = (ROOT / "bin" / "reflex").read_text()
        assert "/dev/nvidiactl" in text
        self.script.write_text(text.replace("/dev/nvidiactl", f"'{marker}'"))
        self.script.chmod(0o755)
        if device:
            marker.touch()
        if package is not None:
            (package / "cuda" / "lib").mkdir(parents=True)
            shutil.copy(early, package / "cuda" / "lib" / "early.so")
            (package / "__init__.py").touch()
            (package / "__main__.py").write_text(MAIN)
        driver = root / "driver"
        driver.mkdir()
        (driver / "libcuda.so.1").symlink_to(library())
        self.report = root / "report"

    def run(self, *arguments: str, script: Path | None = None, **env: str) -> dict:
        environment = {"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": str(self.root / "driver"),
                       "FAKECUDA_REPORT": str(self.report)} | env  # fmt: skip
        result = subprocess.run([script or self.script, *arguments], env=environment, capture_output=True, text=True)
        assert (result.returncode, result.stderr) == (0, "")
        return json.loads(result.stdout)

    def calls(self) -> list[str]:
        return self.report.read_text().partition("[log]\n")[2].partition("[violations]")[0].splitlines()


@pytest.fixture
def environment(tmp_path: Path, early: Path) -> Place:
    """A virtual environment, as pip makes it."""
    place = Place(tmp_path / "env", early, tmp_path / "env" / "lib" / PYTHON / "site-packages" / "reflex_ipc")
    for name in (PYTHON, "python3"):
        (place.bin / name).symlink_to(sys.executable)
    return place


def test_a_command_that_may_use_cuda_starts_the_driver_first(environment: Place):
    said = environment.run("run", "model.gguf", "a prompt  with spaces", "-n", "8")
    assert said["arguments"] == ["run", "model.gguf", "a prompt  with spaces", "-n", "8"]
    assert (said["isolated"], said["no_site"], said["leaked"], said["preload"]) == (1, 1, [], None)
    assert 0 < said["early"][0] <= said["early"][1] <= said["early"][2]
    assert environment.calls() == ["cuInit 0 connections 1", "cuDevicePrimaryCtxRetain 0"]
    assert environment.run("run", CUDA_DEVICE_MAX_CONNECTIONS="3")["early"]
    assert environment.calls()[0] == "cuInit 0 connections 3"


@pytest.mark.parametrize(
    ("arguments", "device"),
    [
        (["stdio", "m.gguf", "--device", "1"], 1),
        (["run", "--device=2", "m.gguf", "p"], 2),
        (["system1", "m.gguf", "--backend", "cuda"], 0),
        (["run", "m.gguf", "--backend=auto"], 0),
        (["run", "m.gguf", "--backend=cpu"], None),
        (["run", "--backend", "cpu", "m.gguf", "--device", "1"], None),
        (["run", "--help"], None),
        (["run", "--device", "first", "m.gguf"], None),
        (["run", "--device=", "m.gguf"], None),
        (["inspect", "m.gguf"], None),
        (["tokenize", "m.gguf", "--device", "1"], None),
        (["hold"], None),  # it wants no context
        (["--version"], None),
        ([], None),
    ],
)
def test_which_commands_do(environment: Place, arguments: list[str], device: int | None):
    said = environment.run(*arguments, FAKECUDA_DEVICES="3")
    assert said["arguments"] == arguments
    if device is None:
        assert said["early"] is None
    else:
        assert environment.calls()[-1] == f"cuDevicePrimaryCtxRetain {device}"


def test_what_the_user_preloads_stays(environment: Place, tmp_path: Path):
    # Any library will do, at a path without spaces, where the loader would split its list.
    other = shutil.copy(library(), tmp_path / "other.so")
    said = environment.run("run", LD_PRELOAD=str(other))
    assert said["early"] and said["preload"] == str(other)
    assert said["leaked"] == ["LD_PRELOAD="]  # which is the user's, for children too
    said = environment.run("inspect", LD_PRELOAD=str(other))
    assert not said["early"] and said["preload"] == str(other)


def test_without_a_device_or_a_driver_nothing_happens(environment: Place, tmp_path: Path, early: Path):
    assert environment.run("run", CUDA_VISIBLE_DEVICES="")["early"] is None
    (environment.root / "driver" / "libcuda.so.1").unlink()
    assert environment.run("run")["early"][1:3] == [0, 0]
    (environment.root / "nvidiactl").unlink()
    assert environment.run("run")["early"] is None


def test_a_driver_that_fails_is_left_to_the_program(environment: Place):
    assert environment.run("run", FAKECUDA_FAIL="cuInit:1:999")["early"][1:3] == [0, 0]
    said = environment.run("run", FAKECUDA_FAIL="cuDevicePrimaryCtxRetain:1:46")
    assert said["early"][1] > 0 and said["early"][2] == 0


def test_leaving_while_the_driver_starts_waits_for_it(environment: Place):
    main = environment.root / "lib" / PYTHON / "site-packages" / "reflex_ipc" / "__main__.py"
    main.write_text("import sys; sys.exit(3)")
    env = {"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": str(environment.root / "driver"), "FAKECUDA_INIT_MS": "300",
           "FAKECUDA_REPORT": str(environment.report)}  # fmt: skip
    assert subprocess.run([environment.script, "run"], env=env).returncode == 3
    # Had it not waited, the report (a destructor of the driver's library) would lack the second call.
    assert environment.calls() == ["cuInit 0 connections 1", "cuDevicePrimaryCtxRetain 0"]


def test_symbolic_links(environment: Place, tmp_path: Path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "reflex").symlink_to(environment.script)
    (elsewhere / "r").symlink_to("reflex")
    assert environment.run("run", script=elsewhere / "r")["early"]


def test_a_path_with_spaces_does_without_the_early_start(tmp_path: Path, early: Path):
    root = tmp_path / "a folder"
    place = Place(root, early, root / "lib" / PYTHON / "site-packages" / "reflex_ipc")
    (place.bin / "python3").symlink_to(sys.executable)
    said = place.run("run", "a b")
    assert (said["arguments"], said["early"], said["no_site"]) == (["run", "a b"], None, 1)
    assert place.run("run", "x", LD_PRELOAD="")["preload"] == ""


def test_an_editable_installation(tmp_path: Path, early: Path):
    source = tmp_path / "source tree"
    place = Place(tmp_path / "env", early, source / "reflex_ipc")
    site = tmp_path / "env" / "lib" / PYTHON / "site-packages"
    site.mkdir(parents=True)
    (site / "__editable__.reflex_ipc-0.1.0.pth").write_text(f"{source}\n")
    (place.bin / PYTHON).symlink_to(sys.executable)
    said = place.run("run")
    assert (said["file"], said["no_site"]) == (str(source / "reflex_ipc" / "__main__.py"), 1)


def test_a_source_tree_and_a_target_folder(tmp_path: Path, early: Path):
    place = Place(tmp_path / "tree", early, tmp_path / "tree" / "reflex_ipc")
    said = place.run("run", PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert (said["file"], said["no_site"]) == (str(tmp_path / "tree" / "reflex_ipc" / "__main__.py"), 1)
    assert said["early"]


def test_a_prefix_without_an_interpreter_takes_the_same_version(tmp_path: Path, early: Path):
    root = tmp_path / "prefix"
    place = Place(root, early, root / "lib" / PYTHON / "dist-packages" / "reflex_ipc")
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / PYTHON).symlink_to(sys.executable)
    (tools / "python3").write_text("#!/bin/sh\nexit 9\n")
    (tools / "python3").chmod(0o755)
    assert place.run("run", PATH=f"{tools}:{os.environ['PATH']}")["executable"] == str(tools / PYTHON)


def test_a_package_elsewhere_is_found_the_ordinary_way(tmp_path: Path, early: Path):
    place = Place(tmp_path / "user", early, None)
    package = tmp_path / "site" / "reflex_ipc"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(MAIN)
    (place.bin / "python3").symlink_to(sys.executable)
    said = place.run("run", "x", PYTHONPATH=str(tmp_path / "site"))
    assert (said["file"], said["isolated"], said["early"]) == (str(package / "__main__.py"), 0, None)


def test_both_names_are_the_same_script():
    assert (ROOT / "bin" / "reflex-ipc").read_bytes() == (ROOT / "bin" / "reflex").read_bytes()
    assert os.access(ROOT / "bin" / "reflex-ipc", os.X_OK)


def test_the_real_package_starts_as_a_file():
    main = ROOT / "reflex_ipc" / "__main__.py"
    for flags in (["-I", "-S"], []):
        result = subprocess.run([sys.executable, *flags, main, "--version"], capture_output=True, text=True, cwd="/")
        assert result.stdout.startswith("reflex "), result.stderr
