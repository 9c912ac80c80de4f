"""The typed errors: one class per error code.

Every class carries the `code` that the wire and the Python interface show, and the `exit_code` the command ends with.
Both are part of the contract and never change meaning. At the end, the one way in which work that takes long is ended
from outside: `go_on`. This module lies on the start-up path and imports nothing that has to be loaded.
"""

from time import monotonic

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    Poll = Callable[[], str | None]
    """Asked whether to go on, between tokens and inside whatever takes long: "cancelled" or "deadline" ends the work.
    """


class ReflexError(Exception):
    """The base of everything this package raises on purpose; itself an internal error."""

    code = "internal"
    exit_code = 1


class CheckFailedError(ReflexError):
    """A self-check (`reflex check`, `reflex smoke`, `reflex doctor`) found a difference."""

    code = "check_failed"
    exit_code = 1


class InvalidRequestError(ReflexError):
    """What was asked for makes no sense: a bad flag, a bad field, an empty prompt. `field` names the one at fault,
    where there is one."""

    code = "invalid_request"
    exit_code = 2

    def __init__(self, message: str = "", field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class InvalidJsonError(InvalidRequestError):
    """A line on the wire is not the JSON the protocol allows."""

    code = "invalid_json"


class TemplateError(InvalidRequestError):
    """The file's chat template failed, or refused the messages."""

    code = "template"


class ModelFileError(ReflexError):
    """The model file is missing, cut, or inconsistent; the message names the key or tensor."""

    code = "model_file"
    exit_code = 3


class UnsupportedModelError(ReflexError):
    """The file is sound, but asks for something this program does not do; the message names the key."""

    code = "unsupported_model"
    exit_code = 4


class DeviceError(ReflexError):
    """The device or its driver is missing, too old, lost, or refused a call."""

    code = "device"
    exit_code = 5


class OutOfMemoryError(ReflexError):
    """Host or device memory does not hold what the run needs; the message has the sum."""

    code = "out_of_memory"
    exit_code = 6


class ContextOverflowError(ReflexError):
    """The prompt, or prompt and answer together, are longer than the context. `field` names another text that is."""

    code = "context_overflow"
    exit_code = 7

    def __init__(self, message: str = "", field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class InputOutputError(ReflexError):
    """A socket, disk or output failed."""

    code = "io"
    exit_code = 11


class DeadlineError(ReflexError):
    """The deadline passed before the work was done."""

    code = "deadline"
    exit_code = 124


class CancelledError(ReflexError):
    """Whoever asked took it back before there was an answer."""

    code = "cancelled"


EXIT_BELOW_CONFIDENCE = 10
"""Exit code of `reflex system1 --min-confidence` when the winner is below it; an answer, not an error."""


_NO_MEMORY = 12  # ENOMEM
_NO_DESCRIPTOR = (23, 24)  # ENFILE, EMFILE


def ran_out(error: BaseException) -> OutOfMemoryError | InputOutputError | None:
    """The error as one of memory or of open files, if that is what it says: Python, the system and the loader of
    libraries each have their own words for it."""
    said = str(error)
    if isinstance(error, MemoryError):
        return OutOfMemoryError("memory ran out")
    if isinstance(error, OSError) and error.errno == _NO_MEMORY:
        return OutOfMemoryError(f"memory ran out: {said}")
    if isinstance(error, ImportError | OSError) and "failed to map segment" in said:
        return OutOfMemoryError("memory ran out while a library was loaded")
    if isinstance(error, RuntimeError) and "start new thread" in said:  # all that CPython says when it is refused one
        return OutOfMemoryError("no thread could be started: memory or processes ran out")
    has_none = isinstance(error, OSError) and error.errno in _NO_DESCRIPTOR
    if has_none or (isinstance(error, ImportError) and "Too many open files" in said):
        return InputOutputError(f"no file can be opened any more (`ulimit -n`): {said}")
    return None


ASK_EVERY_S = 0.01


def go_on(poll: "Poll | None") -> None:
    """Ask `poll`, if there is one, whether to go on. Raises CancelledError or DeadlineError where it has a reason not
    to, "cancelled" or "deadline"."""
    reason = poll() if poll is not None else None
    if reason == DeadlineError.code:
        raise DeadlineError("the deadline passed before there was an answer")
    if reason is not None:
        raise CancelledError("the request was cancelled before there was an answer")


class Watch:
    """`go_on` for the inside of a loop: call it as often as you like, it asks a hundred times a second at most."""

    __slots__ = ("_asked", "_poll")

    def __init__(self, poll: "Poll | None") -> None:
        self._poll = poll
        self._asked = monotonic()

    def __call__(self) -> None:
        if self._poll is not None and monotonic() - self._asked >= ASK_EVERY_S:
            go_on(self._poll)
            self._asked = monotonic()
