"""All of `reflex smoke` on the emulated device: its launches are ones that the kernels take, what they leave is what
smoke says is right, and smoke sees what is wrong. And that smoke leaves no kernel out."""

import re
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import ClassVar

import emulator
import pytest
from emulator.build import library
from emulator.matvec import Matvec
from fakecuda import Fake

from reflex_ipc import smoke
from reflex_ipc.cuda import few, launch, linear
from reflex_ipc.cuda.device import Device, start_driver
from reflex_ipc.cuda.lower import Lowering
from reflex_ipc.cuda.products import Call
from reflex_ipc.cuda.sampling import Sampling
from reflex_ipc.errors import CheckFailedError
from reflex_ipc.sampler import Sampled, Sampler
from reflex_ipc.sampler import Sampling as Settings
from reflex_ipc.smoke import bench, experts, matrices

pytest_plugins = ["fakecuda.fixtures"]
KERNELS = Path(launch.LIB) / "sm_90a" / "kernels.txt"
pytestmark = pytest.mark.skipif(not KERNELS.exists(), reason="the kernels are not built: kernels/build.py all")

KINDS = ("F32", "F16", "Q8_0", "Q4_K", "Q6_K", "IQ3_S", "NVFP4")
"""Types whose products are made for the emulated device: of every kind that is treated differently."""
FAMILY = re.compile(r"(matvec|mma|few|widen|grouped|embed|attention_(?:decode|prefill|latent)|delta_(?:rule|tree))_.*")


def family(kernel: str) -> str:
    """Kernels that differ in types and sizes only are of one."""
    found = FAMILY.fullmatch(kernel)
    return found[1] if found else kernel


def names_of(kernels_txt: Path) -> set[str]:
    """Every kernel of a build."""
    return {line.partition(" ")[0] for line in kernels_txt.read_text().splitlines()[1:]}


class OneRow:
    """Products of one row, which have a library of their own."""

    def __init__(self, name: str, matvec: Matvec) -> None:
        self.name, self.matvec = name, matvec

    def prepare(self, grid, block, arguments, stream, *, shared: int = 0, **_: object):
        return partial(self.matvec, [Call(self.name, grid, block, shared, tuple(arguments))])


class Kernels(launch.Kernels):
    """Kernels that are launched in place of others, where `instead` says so; `launched` has those asked for."""

    instead: ClassVar[dict[str, str]] = {}
    launched: ClassVar[set[str]] = set()
    matvec: ClassVar[Matvec]

    def function(self, name: str) -> launch.Function:
        self.launched.add(name)
        name = self.instead.get(name, name)
        return OneRow(name, self.matvec) if name.startswith("matvec_") else super().function(name)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Smoke runs on the emulated device."""
    lib = str(emulator.kernels(KERNELS, tmp_path))
    monkeypatch.setattr(smoke, "start_driver", partial(start_driver, library=str(library(KERNELS))))
    monkeypatch.setattr(bench, "Kernels", partial(Kernels, lib=lib))
    monkeypatch.setattr(
        Kernels, "matvec", Matvec([*((k, k) for k in KINDS), ("Q4_K", "Q5_K"), ("Q4_K", "Q6_K")]), raising=False
    )
    monkeypatch.setattr(Kernels, "launched", set())
    for module in (experts, matrices):
        monkeypatch.setattr(module, "KINDS", KINDS)


def run() -> int:
    return smoke.smoke(Namespace(device=0))


def only(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """Smoke runs no other family."""
    chosen = [each for each in smoke.families() if each[0].startswith(family)]
    assert len(chosen) == 1
    monkeypatch.setattr(smoke, "families", lambda: chosen)


def test_every_family_is_right(emulated, capfd: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    right = [line[9:52].strip() for line in capfd.readouterr().out.splitlines() if line.startswith("ok ")]
    assert right == [name for name, _ in smoke.families()]
    assert set(map(family, names_of(KERNELS))) == set(map(family, Kernels.launched))


@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_100", "sm_120"])
def test_no_kernel_is_left_out(fake: Fake, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    """On a driver that computes nothing, so that nothing is compared: smoke has all types launch all they have."""
    monkeypatch.setattr(Sampling, "receive", lambda *_: Sampled(0, 0.0, ()))
    number = int(target.strip("sm_a"))
    fake.set(major=number // 10, minor=number % 10)
    lines = Path(launch.LIB) / target / "kernels.txt"
    fake.c.fake_kernels(str(lines).encode())
    with Device(0, fake.cu) as device:
        on = bench.Bench(device)
        for _, each in smoke.families():
            for _ in each(on):
                pass
    launched = {line.split()[1] for line in fake.log if line.startswith("cuLaunchKernelEx")}
    assert names_of(lines) - launched == set()


@pytest.mark.parametrize(
    ("wrong", "instead", "family"),
    [
        ("embed_Q8_0", "embed_Q4_0", "embedding rows"),
        ("swiglu", "add", "norms, gates, sums, slices"),
        ("attention_latent_4", "attention_latent_1", "latent"),
        ("mma_q8_0_8", "mma_q5_0_8", "products and"),
    ],
)
def test_a_wrong_kernel_is_seen(emulated, monkeypatch, wrong: str, instead: str, family: str) -> None:
    only(monkeypatch, family)
    monkeypatch.setattr(Kernels, "instead", {wrong: instead})
    with pytest.raises(CheckFailedError, match=f"^{family}.*: off by"):
        run()


def without(function, **fields: object):
    """A function of matrices that leaves something of them out."""
    return lambda matrices, *rest: function([matrix._replace(**fields) for matrix in matrices], *rest)


def of_others(lowering, op, q, k, v, rotate=None, norm_q=None, norm_k=None):
    """Heads whose norms are each other's."""
    return HEADS(lowering, op, q, k, v, rotate, norm_k, norm_q)


def settings_that_lack(name: str, value: object):
    """`Sampling.begin`, one setting being what it is by default."""

    def begin(choice, sampler):
        settings = {each: getattr(sampler.sampling, each) for each in sampler.sampling.__slots__} | {name: value}
        mistaken = Sampler(Settings(**settings), sampler.n_vocab, [])
        mistaken._tokens, mistaken._counts = sampler._tokens, sampler._counts
        BEGIN(choice, mistaken)

    return begin


HEADS, BEGIN = Lowering._heads, Sampling.begin


@pytest.mark.parametrize(
    ("where", "name", "what", "family"),
    [
        (linear, "pack_matrices", without(linear.pack_matrices, bias=0), "products and"),
        (linear, "pack_matrices", without(linear.pack_matrices, residual=0), "products and"),
        (few, "pack_matrices", without(few.pack_matrices, bias=0), "products and"),
        (few, "pack_matrices", without(few.pack_matrices, residual=0), "products and"),
        (Lowering, "_heads", of_others, "attention"),
        (Sampling, "begin", settings_that_lack("top_k", 0), "sampling"),
        (Sampling, "begin", settings_that_lack("top_p", 1.0), "sampling"),
        (Sampling, "begin", settings_that_lack("min_p", 0.0), "sampling"),
        (Sampling, "begin", settings_that_lack("seed", 1), "sampling"),
        (Sampling, "begin", settings_that_lack("repeat_penalty", 1.0), "sampling"),
        (Sampling, "begin", settings_that_lack("presence_penalty", 0.0), "sampling"),
        (Sampling, "begin", settings_that_lack("frequency_penalty", 0.0), "sampling"),
    ],
)
def test_what_a_kernel_leaves_out_is_seen(emulated, monkeypatch, where, name: str, what, family: str) -> None:
    """Not only a kernel that is quite another: one that takes no notice of one of its arguments."""
    only(monkeypatch, family)
    monkeypatch.setattr(where, name, what)
    with pytest.raises(CheckFailedError, match=f"^{family}.*: off by"):
        run()


def test_writing_behind_the_end_is_seen(emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    room = bench.Bench.room
    monkeypatch.setattr(bench.Bench, "room", lambda bench, size: room(bench, size - 1))
    with pytest.raises(CheckFailedError, match=r"^embedding rows: a kernel wrote behind the end"):
        run()
