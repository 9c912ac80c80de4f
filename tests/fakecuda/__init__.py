"""A libcuda without a device (fake.h says what it does), built once and loaded beside whatever real one there is."""

import ctypes
import hashlib
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from reflex_ipc.cuda.driver import Driver
from reflex_ipc.errors import DeviceError, OutOfMemoryError, ReflexError

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def compile_c(name: str, sources: list[Path], flags: tuple[str, ...] = ()) -> Path:
    """A shared library from C sources, kept in build/tests by the hash of what went into it."""
    command = [
        os.environ.get("CC", "cc"),
        "-std=gnu11",
        "-O1",
        "-g",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-fPIC",
        "-shared",
        *flags,
    ]
    digest = hashlib.sha256(repr(command).encode() + b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    out = ROOT / "build" / "tests" / f"{name}-{digest}.so"
    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        part = out.with_suffix(f".{os.getpid()}")
        subprocess.run(
            [*command, "-o", part, *(s for s in sources if s.suffix == ".c"), "-lpthread", "-ldl"], check=True
        )
        part.rename(out)
    return out


def library() -> Path:
    """The fake's path."""
    return compile_c("fakecuda", [*sorted(HERE.glob("*.c")), HERE / "fake.h"])


def native_part() -> Path:
    """kernels/native as the build makes it, but for its name: early.so."""
    return compile_c("early", sorted((ROOT / "kernels" / "native").glob("*.c")), ("-O2", "-fvisibility=hidden"))


DEFAULTS = {
    "deferred": 0, "devices": 1, "major": 9, "minor": 0, "memory": 1 << 30, "virtual_memory": 1,
    "read_only_register": 1, "compute_mode": 0, "version": 13000, "init_ms": 0, "context_ms": 0,
    "registrable": 1, "energy": 1,
}  # fmt: skip
"""What can be set, and to what it is when nobody does; as `settings` in core.c."""


class Fake:
    """The fake driver: `cu` goes where a `Driver` goes, the methods look at what was done."""

    def __init__(self, kernels: Path | None = None) -> None:
        self.path = str(library())
        self.c = ctypes.CDLL(self.path)
        for name in ("fake_log", "fake_violations", "fake_leaks"):
            self.c[name].restype = ctypes.c_char_p
            setattr(self.c, name, self._text(name))
        self.c.fake_set.argtypes = (ctypes.c_char_p, ctypes.c_long)
        self.c.fake_fail.argtypes = (ctypes.c_char_p, ctypes.c_long, ctypes.c_int, ctypes.c_int)
        self.c.fake_calls.restype = ctypes.c_long
        self.c.fake_reset()
        self._changed: set[str] = set()
        if kernels is not None:
            self.c.fake_kernels(str(kernels).encode())
        self.cu = Driver(self.path)

    def _text(self, name: str) -> ctypes._CFuncPtr:
        function = self.c[name]
        function.restype = ctypes.c_char_p
        return function

    def set(self, **settings: int) -> None:
        """Change how the fake behaves, until the end of the test."""
        for name, value in settings.items():
            assert name in DEFAULTS
            self._changed.add(name)
            self.c.fake_set(name.encode(), value)

    def fail(self, name: str = "", n: int = 1, code: int = 999, lost: bool = False) -> None:
        """Make the n-th call from now fail: of `name`, or of any function."""
        self.c.fake_fail(name.encode(), n, code, lost)

    def fails_left(self) -> bool:
        """Whether the call that was to fail has not come."""
        return bool(self.c.fake_fails_left())

    def reset(self) -> None:
        """Forget everything but the settings and kernels."""
        self.c.fake_reset()

    @property
    def calls(self) -> int:
        return int(self.c.fake_calls())

    @property
    def log(self) -> list[str]:
        """Every call so far: its name, and the arguments that can be compared."""
        return self.c.fake_log().decode().splitlines()

    @property
    def violations(self) -> list[str]:
        """What the real driver would have answered with garbage or a crash."""
        return self.c.fake_violations().decode().splitlines()

    @property
    def leaks(self) -> list[str]:
        """What has not been given back."""
        return self.c.fake_leaks().decode().splitlines()

    def end(self) -> None:
        """Put the settings back."""
        for name in self._changed:
            self.c.fake_set(name.encode(), DEFAULTS[name])
        self.c.fake_reset()


def fail_each_call(fake: Fake, opened: Callable[[], Any], use: Callable[[Any], None]) -> None:
    """Open, use and close an executor with each of its driver calls failing in turn: each time it is a typed error,
    nothing is done that the driver forbids, and nothing is left behind."""
    executor = opened()
    use(executor)
    executor.close()
    calls = fake.calls
    fake.reset()
    for n in range(1, calls + 1):
        fake.fail(n=n, code=700)
        executor = None
        try:
            executor = opened()
            use(executor)
        except (DeviceError, OutOfMemoryError):
            pass
        finally:
            try:
                if executor is not None:
                    executor.close()
            except ReflexError:
                pass
        assert fake.violations == []
        assert fake.leaks == [], n
        fake.reset()
