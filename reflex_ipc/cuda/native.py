"""The native part of the package, `lib/early.so`: what is begun before the interpreter, the upload's reader threads,
and the walk over a vocabulary.

It is built with the kernels. Without it everything works, later and slower.
"""

import ctypes
import os

from reflex_ipc.cuda import LIB

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

_SIGNATURES: "dict[str, tuple[Any, tuple[Any, ...]]]" = {
    "reflex_early_times": (None, (ctypes.c_void_p,)),
    "reflex_early_device": (ctypes.c_int, ()),
    "reflex_early_header": (
        ctypes.c_int,
        (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p),
    ),
    "reflex_early_upload": (ctypes.c_void_p, ()),
    "reflex_early_base": (ctypes.c_uint64, ()),
    "reflex_early_drop": (None, (ctypes.c_int,)),
    "reflex_string_lengths": (
        ctypes.c_uint64,
        (ctypes.c_void_p, *[ctypes.c_uint64] * 4, ctypes.c_void_p, ctypes.c_void_p),
    ),
    "reflex_upload_new": (ctypes.c_void_p, (ctypes.c_int, ctypes.c_int, ctypes.c_size_t)),
    "reflex_upload_order": (
        None,
        (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint, ctypes.c_int),
    ),
    "reflex_upload_hold": (None, (ctypes.c_void_p, ctypes.c_int)),
    "reflex_upload_ask": (
        None,
        (ctypes.c_void_p, ctypes.c_uint, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_size_t),
    ),
    "reflex_upload_start": (None, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_uint64)),
    "reflex_upload_events": (None, (ctypes.c_void_p,)),
    "reflex_upload_wait": (ctypes.c_int, (ctypes.c_void_p, ctypes.c_uint, ctypes.c_int)),
    "reflex_upload_join": (ctypes.c_int, (ctypes.c_void_p, ctypes.c_int)),
    "reflex_upload_event": (ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_uint)),
    "reflex_upload_queued": (ctypes.c_uint64, (ctypes.c_void_p,)),
    "reflex_upload_ring": (None, (ctypes.c_void_p, ctypes.c_void_p)),
    "reflex_upload_failure": (
        ctypes.c_int,
        (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p),
    ),
    "reflex_upload_free": (None, (ctypes.c_void_p,)),
}

EARLY_STEPS = ("begun", "driver", "context", "file", "copying")
"""What `early_times` has times of, in the order of the library's."""


def load(lib: str = LIB) -> ctypes.CDLL | None:
    """The library with its functions declared, or None when it was not built or does not load here."""
    try:
        library = ctypes.CDLL(os.path.join(lib, "early.so"))
        for name, (result, arguments) in _SIGNATURES.items():
            function = library[name]
            function.restype = result
            function.argtypes = arguments
            setattr(library, name, function)
    except (OSError, AttributeError):  # AttributeError: it is of another version of the package
        return None
    return library


def early_times(library: ctypes.CDLL) -> dict[str, float]:
    """CLOCK_MONOTONIC seconds of the steps before the interpreter, but for those not reached: none if not preloaded."""
    times = (ctypes.c_double * len(EARLY_STEPS))()
    library.reflex_early_times(times)
    return {step: time for step, time in zip(EARLY_STEPS, times, strict=True) if time}


class HeaderReader:
    """What a GGUF's reader leaves to the native part; see `gguf.Native`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._c = library
        self._at = 0  # of the header that was read early

    def beginning(self, status: os.stat_result) -> memoryview | None:
        at, length = ctypes.c_void_p(), ctypes.c_size_t()
        if not self._c.reflex_early_header(
            status.st_dev, status.st_ino, status.st_size, ctypes.byref(at), ctypes.byref(length)
        ):
            return None
        self._at = at.value or 0
        return memoryview((ctypes.c_ubyte * length.value).from_address(self._at)).cast("B").toreadonly()

    def string_lengths(
        self, buffer: bytes | memoryview, at: int, count: int, block: int
    ) -> "tuple[int, Sequence[int], Sequence[int]] | None":
        lengths = (ctypes.c_uint32 * count)()
        starts = (ctypes.c_uint64 * -(-count // block))()
        where = buffer if isinstance(buffer, bytes) else self._at
        end = self._c.reflex_string_lengths(where, len(buffer), at, count, block, lengths, starts)
        found: tuple[int, Sequence[int], Sequence[int]] = end, lengths, starts  # type: ignore[assignment]
        return found if end or not count else None
