"""All of `reflex smoke` on the emulated device: its launches are ones that the kernels take, what they leave is what
smoke says is right, and smoke sees what is wrong."""

from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import ClassVar

import emulator
import pytest
from emulator.build import library
from emulator.matvec import Matvec

from reflex_ipc import smoke
from reflex_ipc.cuda import launch, linear
from reflex_ipc.cuda.device import start_driver
from reflex_ipc.cuda.products import Call
from reflex_ipc.errors import CheckFailedError

KERNELS = Path(launch.LIB) / "sm_90a" / "kernels.txt"
pytestmark = pytest.mark.skipif(not KERNELS.exists(), reason="the kernels are not built: kernels/build.py all")

WAYS = {1: {"matvec"}, 5: {"prepare", "mma"}, 80: {"prepare", "few"}, 150: {"prepare", "widen", "gemm"}}
"""Rows -> the families of kernels that multiply them."""


class Kernels(launch.Kernels):
    """Kernels that are launched in place of others, where `instead` says so."""

    instead: ClassVar[dict[str, str]] = {}

    def function(self, name: str) -> launch.Function:
        return super().function(self.instead.get(name, name))


@pytest.fixture
def multiplied(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[int, set[str]]:
    """Smoke runs on the emulated device. Rows -> the families of kernels that have multiplied so many."""
    matvec = Matvec([("F16", "F16"), ("Q8_0", "Q8_0")])
    families: dict[int, set[str]] = {}

    class OfOneRow(Call):
        """Its kernel has a library of its own."""

        def prepare(self, *_: object, **__: object):
            return partial(matvec, [self])

    def products(limits, x, *arguments, **options):
        calls = emulator.REAL_LINEAR(limits, x, *arguments, **options)
        families.setdefault(x.n, set()).update(call.kernel.partition("_")[0] for call in calls)
        return [OfOneRow(*call) if call.kernel.startswith("matvec_") else call for call in calls]

    lib = str(emulator.kernels(KERNELS, tmp_path))
    monkeypatch.setattr(smoke, "start_driver", partial(start_driver, library=str(library(KERNELS))))
    monkeypatch.setattr(smoke, "Kernels", partial(Kernels, lib=lib))
    monkeypatch.setattr(linear, "linear", products)
    return families


def run() -> int:
    return smoke.smoke(Namespace(device=0))


def test_every_family_is_right(multiplied: dict[int, set[str]], capfd: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    right = [line[9:52].strip() for line in capfd.readouterr().out.splitlines() if line.startswith("ok ")]
    assert right == list(smoke.FAMILIES)
    assert multiplied == WAYS


@pytest.mark.parametrize(
    ("wrong", "instead", "family"),
    [
        ("embed_Q8_0", "embed_Q4_0", "embedding rows"),
        ("swiglu", "add", "SwiGLU, sums"),
        ("mma_q8_0_8", "mma_q5_0_8", "products"),
    ],
)
def test_a_wrong_kernel_is_seen(multiplied, monkeypatch, wrong: str, instead: str, family: str) -> None:
    monkeypatch.setattr(Kernels, "instead", {wrong: instead})
    with pytest.raises(CheckFailedError, match=f"^{family}.*: off by"):
        run()


def test_writing_behind_the_end_is_seen(multiplied, monkeypatch: pytest.MonkeyPatch) -> None:
    room = smoke.Bench.room
    monkeypatch.setattr(smoke.Bench, "room", lambda bench, size: room(bench, size - 1))
    with pytest.raises(CheckFailedError, match=r"^embedding rows: a kernel wrote behind the end"):
        run()
