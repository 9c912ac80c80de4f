"""Fixtures of the sidecar's tests: real engines on the CPU, behind a socket and as a child."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "sidecar"))

from running import Sidecar, UdsEngine, engine_command  # noqa: E402


@pytest.fixture(scope="session")
def child(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    """A sidecar that runs its engine itself."""
    with Sidecar(tmp_path_factory.mktemp("child"), "--", *engine_command("stdio", tiny)) as sidecar:
        yield sidecar


@pytest.fixture(scope="session")
def uds_engine(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[UdsEngine]:
    with UdsEngine(tiny, tmp_path_factory.mktemp("engine")) as engine:
        yield engine


@pytest.fixture(scope="session")
def socket_sidecar(uds_engine: UdsEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    """A sidecar of an engine that runs by itself."""
    with Sidecar(tmp_path_factory.mktemp("socket"), "--socket", uds_engine.path) as sidecar:
        yield sidecar


@pytest.fixture(params=["child", "socket_sidecar"])
def sidecar(request: pytest.FixtureRequest) -> Sidecar:
    """Each of the two in turn."""
    value: Sidecar = request.getfixturevalue(request.param)
    return value
