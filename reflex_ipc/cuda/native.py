"""The native part of the package, `lib/early.so`: the early start of the driver and the upload's reader threads.

It is built with the kernels. Without it everything works, later and slower.
"""

import ctypes
import os

from reflex_ipc.cuda.launch import LIB

_SIGNATURES = {
    "reflex_early_times": (None, (ctypes.c_void_p,)),
    "reflex_upload_new": (ctypes.c_void_p, (ctypes.c_int, ctypes.c_int, ctypes.c_size_t)),
    "reflex_upload_order": (None, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)),
    "reflex_upload_start": (
        None,
        (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint),
    ),
    "reflex_upload_wait": (ctypes.c_int, (ctypes.c_void_p, ctypes.c_uint, ctypes.c_int)),
    "reflex_upload_join": (ctypes.c_int, (ctypes.c_void_p, ctypes.c_int)),
    "reflex_upload_event": (ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_uint)),
    "reflex_upload_queued": (ctypes.c_uint64, (ctypes.c_void_p,)),
    "reflex_upload_failure": (
        ctypes.c_int,
        (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p),
    ),
    "reflex_upload_free": (None, (ctypes.c_void_p,)),
}


def load(lib: str = LIB) -> ctypes.CDLL | None:
    """The library with its functions declared, or None when it was not built or does not load here."""
    try:
        library = ctypes.CDLL(os.path.join(lib, "early.so"))
    except OSError:
        return None
    for name, (result, arguments) in _SIGNATURES.items():
        function = library[name]
        function.restype = result
        function.argtypes = arguments
        setattr(library, name, function)
    return library


def early_times(library: ctypes.CDLL) -> tuple[float, float, float] | None:
    """CLOCK_MONOTONIC seconds at which the preloaded start began, had the driver, had the context; 0 for not reached.

    None when the library was not preloaded.
    """
    times = (ctypes.c_double * 3)()
    library.reflex_early_times(times)
    return (times[0], times[1], times[2]) if times[0] else None
