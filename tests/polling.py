"""How often something long asks whether to go on."""

import gc
import time


class Poll:
    """What is passed down as `poll`: it ends the work after some seconds, and keeps the longest time between two
    questions. Both are of this thread's own time, as the machine may be busy, and what other tests left behind is not
    looked through meanwhile: a collection of all that a whole run has takes more than the work does."""

    def __init__(self, seconds: float) -> None:
        gc.collect()
        gc.freeze()
        self.longest = 0.0
        self._began = self._last = time.thread_time()
        self._seconds = seconds

    def __call__(self) -> str | None:
        now = time.thread_time()
        self.longest, self._last = max(self.longest, now - self._last), now
        return "cancelled" if now - self._began > self._seconds else None
