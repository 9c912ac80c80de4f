"""Tests that need a device: they are skipped where there is none, and a whole run that passes is sealed.

`pytest -m gpu`, and again with REFLEX_FORCE_PTX=1, from the root; see kernels/seal.py.
"""

import os
from pathlib import Path

import pytest

import seal
from reflex_ipc.backends import DEVICE_NODES
from reflex_ipc.cuda import launch
from reflex_ipc.cuda.device import Device
from reflex_ipc.cuda.driver import Driver
from reflex_ipc.cuda.launch import Kernels

_outcomes: dict[str, str] = {}
_reasons: dict[str, str] = {}
"""Why tests were skipped."""
_deselected: list[str] = []
"""Tests of a device that the command line left out: by -k, --deselect, --stepwise."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    absent = pytest.mark.skip(reason="there is no NVIDIA device here")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not any(map(os.path.exists, DEVICE_NODES)):
                item.add_marker(absent)


@pytest.fixture(scope="session")
def device():
    """The first device. Where there is one (else no test gets here) that cannot be used, tests fail."""
    with Device(0) as device:
        yield device


@pytest.fixture(scope="session")
def kernels(device: Device) -> Kernels:
    """The kernels of this build, as the run's environment chooses them."""
    if not launch.shipped():
        pytest.fail("there is a device but no kernels: python kernels/build.py all")
    return Kernels(device)


def pytest_deselected(items: list[pytest.Item]) -> None:
    _deselected.extend(item.nodeid for item in items if "gpu" in item.keywords)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A module that skips itself, for want of a package, is not left unsaid."""
    if report.skipped and report.nodeid.startswith("tests/gpu/") and isinstance(report.longrepr, tuple):
        _outcomes[report.nodeid] = "skipped"
        _reasons[report.nodeid] = str(report.longrepr[2]).removeprefix("Skipped: ")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "gpu" in report.keywords:
        worst = _outcomes.get(report.nodeid, "passed")
        _outcomes[report.nodeid] = worst if worst != "passed" else report.outcome
        if report.skipped and isinstance(report.longrepr, tuple):
            _reasons[report.nodeid] = str(report.longrepr[2]).removeprefix("Skipped: ")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    option = session.config.option
    # Without a word: files by --ignore, and everything that did not fail by --lf.
    seen = {name.partition("::")[0] for name in _outcomes}
    unseen = {f"tests/gpu/{path.name}" for path in Path(__file__).parent.glob("test_*.py")} - seen
    partial = _deselected or unseen or getattr(option, "lf", False)
    partial = partial or session.config.args_source == pytest.Config.ArgsSource.ARGS
    whole = option.markexpr == "gpu" and not partial
    passed = [name for name, outcome in _outcomes.items() if outcome == "passed"]
    if whole and exitstatus == 0 and passed and not hasattr(session.config, "workerinput"):
        run = "ptx" if os.environ.get("REFLEX_FORCE_PTX") == "1" else "cubin"
        skipped = {name: _reasons.get(name, "not said") for name in set(_outcomes) - set(passed)}
        with Device(0) as device:
            seal.Seal().record(run, passed, device.name, release(), skipped)


def release() -> str:
    """The driver's release, "580.159.03", or the CUDA version it supports where the kernel does not say."""
    try:
        first = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
        return next(word for word in first.split() if word[0].isdigit() and "." in word)
    except (OSError, StopIteration, IndexError):
        return "CUDA {}.{}".format(*Driver().version())
