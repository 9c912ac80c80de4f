"""Entry of the command, as `python -m reflex_ipc` and as a file run by the installed launcher under `-I -S`."""

import _signal as signal  # type: ignore[import-not-found]  # the other imports much that Ctrl-C would meet
import gc
import sys
from time import monotonic_ns

if __name__ == "__main__":
    began = monotonic_ns()
    # A start leaves no garbage that looking for it would find, and looking costs it 5 ms. What serves on turns it on.
    gc.disable()
    if not __package__:
        # Run as a file: the path may have this folder, whose modules would hide the standard library's, and lacks
        # the one this package lies in, which goes last as every installed package does.
        package = __file__.rpartition("/")[0]
        sys.path[:] = [*(path for path in sys.path if path != package), package.rpartition("/")[0]]
    # Ctrl-C ends the process at once and without a traceback, also while it still imports; what was printed is out.
    # Commands that have something to put away set handlers of their own. What a shell has its background jobs ignore
    # stays ignored.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    try:
        from reflex_ipc.stamps import stamp

        stamp("interpreter", at=began)
        from reflex_ipc.cli import main
    except (MemoryError, OSError, ImportError) as error:
        from posix import _exit, write

        number, said = getattr(error, "errno", None), str(error)
        if isinstance(error, MemoryError) or "map segment" in said or number == 12:
            write(2, b"reflex: memory ran out before the program was loaded\n")
            _exit(6)  # as OutOfMemoryError, whose module may not be there
        if "Too many open files" in said or number in (23, 24):
            write(2, b"reflex: no file could be opened any more before the program was loaded: ulimit -n\n")
            _exit(11)  # as InputOutputError
        raise

    if code := main(sys.argv[1:]):
        from os import _exit  # loaded long since

        # Whatever failed has been said, and no buffer holds any of it. An orderly end would wait for a driver that is
        # still starting, whose exit handlers must not meet that; the kernel takes back what it has.
        _exit(code)
