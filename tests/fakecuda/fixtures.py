"""Fixtures of the tests that run against the fake driver: `pytest_plugins = ["fakecuda.fixtures"]` brings them in."""

import zlib
from pathlib import Path

import pytest

from fakecuda import Fake
from reflex_ipc.cuda.device import Device


@pytest.fixture
def fake():
    """A fresh fake driver; a test that leaves a violation or a leak fails."""
    fake = Fake()
    yield fake
    violations, leaks = fake.violations, fake.leaks
    fake.end()
    assert (violations, leaks) == ([], [])


KERNELS = """\
13.0.88
scale scale.cubin u32@0 f32@4 u64@8 u64@16
everything scale.cubin u8@0 u16@2 u32@4 u64@8 f32@16 f64@24 b8[20]@32 b8[2]@52 u64@56
nothing empty.cubin
"""


@pytest.fixture
def lib(tmp_path: Path) -> Path:
    """A directory like reflex_ipc/cuda/lib, with images that say no more than what they are."""
    for target in ("sm_80", "sm_90a", "compute_80"):
        directory = tmp_path / "lib" / target
        directory.mkdir(parents=True)
        ptx = target.startswith("compute")
        for name in ("scale", "empty"):
            (directory / f"{name}.{'ptx.z' if ptx else 'cubin'}").write_bytes(
                zlib.compress(b".version 9.0\n") if ptx else b"\x7fELF...."
            )
        (directory / "kernels.txt").write_text(KERNELS.replace("cubin", "ptx.z") if ptx else KERNELS)
    return tmp_path / "lib"


@pytest.fixture
def device(fake: Fake, lib: Path):
    """An open device of the fake driver, with the kernels of `lib`."""
    fake.c.fake_kernels(str(lib / "sm_90a" / "kernels.txt").encode())
    with Device(0, fake.cu) as device:
        yield device
