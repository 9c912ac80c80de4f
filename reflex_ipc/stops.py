"""Where an answer ends: at stop strings, whose text goes out once it can no longer be one, or at a length."""

from collections.abc import Sequence

from reflex_ipc.errors import InvalidRequestError

DEFAULT_MAX_TOKENS = 128
"""Tokens of an answer where nobody says."""
MAX_STOPS = 16
MAX_STOP_CHARS = 256


class StopStrings:
    """Watches the text of an answer, piece by piece, for the first stop string.

    The one whose last character comes first ends the answer; of several that end there, the longest. What is let
    out before it, and where the answer ends, depend on the text alone, never on how it was cut into pieces.

    Raises InvalidRequestError for what is not a list of at most 16 strings of 1 to 256 characters.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if not isinstance(stops, list | tuple) or len(stops) > MAX_STOPS:
            raise InvalidRequestError(f"stop must be a list of at most {MAX_STOPS} strings", "stop")
        for i, stop in enumerate(stops):
            if not isinstance(stop, str) or not 1 <= len(stop) <= MAX_STOP_CHARS:
                raise InvalidRequestError(
                    f"stop[{i}] must be a string of 1 to {MAX_STOP_CHARS} characters", f"stop[{i}]"
                )
        self._stops = tuple(stops)
        self._beginnings = frozenset(stop[:n] for stop in stops for n in range(1, len(stop)))
        self._longest = max((len(stop) for stop in stops), default=1)
        self._held = ""
        self._stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """Take the next piece; returns the text that may go out now, and whether a stop string has ended the answer.

        Neither the stop string nor anything after it ever goes out. After the end every piece gives ("", True).
        """
        if self._stopped:
            return "", True
        text = self._held + text
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            self._held, self._stopped = "", True
            return text[: min(found)[1]], True
        keep = min(self._longest - 1, len(text))
        while keep > 0 and text[-keep:] not in self._beginnings:
            keep -= 1
        border = len(text) - keep
        self._held = text[border:]
        return text[:border], False

    def flush(self) -> str:
        """The text still held back: it goes out when the answer ends for another reason than a stop string."""
        held, self._held = self._held, ""
        return held
