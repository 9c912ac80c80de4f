"""When this process got how far: CLOCK_MONOTONIC nanoseconds by name.

    stamp("header")                     # the phase "header" of this track ends now
    stamp("module norm", began)         # a phase within another: from `began` on
    stamp("context", began, at=ns, track="driver")  # what a clock elsewhere, in C or on another thread, has seen
    ms(began, stamp("prompt"))          # what the phase took, for whoever reports it

A name that comes again replaces the one before, so what is kept is bounded, and of the newest model and request. A
stamp costs less than a microsecond; everything that makes something of them is in timings.py, which nobody imports
unless asked for. This lies on the start-up path and imports nothing but the clock.
"""

from time import monotonic_ns

MAIN = "main"
moments: dict[str, tuple[int | None, int, str]] = {}
"""Name -> when the phase began (None: where the one before it on its track ended), when it ended, its track."""


def stamp(name: str, began: int | None = None, *, at: int | None = None, track: str = MAIN) -> int:
    """Keep that a phase has ended, now or at `at`; which moment that is. What tells a duration takes the two moments it
    lies between from here, so that each is read from the clock once."""
    if at is None:
        at = monotonic_ns()
    moments.pop(name, None)  # the newest last
    moments[name] = began, at, track
    return at


def ms(began: int, ended: int) -> float:
    """Milliseconds between two moments."""
    return (ended - began) / 1e6


def lasted(*names: str) -> dict[str, float]:
    """`{"NAME_ms": milliseconds}` of those phases that were stamped with their beginning."""
    found = {name: moments[name] for name in names if name in moments}
    return {f"{name}_ms": ms(began, at) for name, (began, at, _) in found.items() if began is not None}
