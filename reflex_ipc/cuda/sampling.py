"""Sampling on the device: settings go in, tokens come out through a mailbox in page-locked memory.

The kernels are in kernels/sample.cu; docs/sampling.md defines what they compute. The sampled token is the input of the
next step without the host's doing; the host reads it, with what is reported of it, from the mail of its number.
"""

from struct import Struct

from reflex_ipc.cuda.memory import aligned
from reflex_ipc.errors import DeviceError, ReflexError
from reflex_ipc.sampler import Sampled

TYPE_CHECKING = False
if TYPE_CHECKING:
    from reflex_ipc.cuda.device import Device, Stream
    from reflex_ipc.cuda.launch import Kernels, Launch
    from reflex_ipc.cuda.memory import Pinned
    from reflex_ipc.cuda.places import Places
    from reflex_ipc.sampler import Sampler

CONTROL = Struct("<4i24x")
"""Tokens in the cache before the step, tokens the step adds, number of the next mail, which of the two recurrent states
is the one before the step; then what the kernels keep, zero at first."""
_SETTINGS = Struct("<d4Q3d6i")
_CHANGE = Struct("<d4i")
_MAIL = Struct("<ifdii20i20ffi")
_SAMPLE = Struct("<10Q2i")

MAILS = 4
MOST_TOP = 20
_ONE = 1 << 40
_FLOAT32_MAX = 3.4028234663852886e38
_BLOCKS = 128  # of sample_peak
SPINS = 4096  # looks into the mailbox between two at whether the device still works


class Sampling:
    """Chooses tokens and hands them on to the step's inputs at `places`. `serial` counts the choices queued so far."""

    def __init__(
        self,
        device: "Device",
        kernels: "Kernels",
        stream: "Stream",
        n_vocab: int,
        places: "Places",
    ) -> None:
        self.device = device
        self.kernels = kernels
        self.stream = stream
        self.n_vocab = n_vocab
        self.places = places
        self.serial = 0
        self._mailbox: Pinned | None = None
        self._serials = memoryview(b"")
        sums = 12 * _BLOCKS
        self._memory = device.allocate(sums + aligned(_SETTINGS.size) + MAILS * _MAIL.size, "sampling")
        self._settings = self._memory.address + sums
        self._letters = self._settings + aligned(_SETTINGS.size)
        # A choice writes no more of its letter than it reports; one that was never written holds NaN, and is refused.
        stream.fill(self._letters, 0xFF, MAILS * _MAIL.size)
        self._adjusted = 0
        self._changes = 0
        self._event = device.event()

    # What a request asks for

    def begin(self, sampler: "Sampler") -> None:
        """Queue the settings of an answer that goes on with `sampler`."""
        s = sampler.sampling
        changes = self._changes_of(sampler) if s.adjusts else []
        if changes:
            self._make_room()
            self.stream.to_device(self._changes, b"".join(_CHANGE.pack(*change) for change in changes))
        seed = s.seed or 0
        packed = _SETTINGS.pack(
            s.temperature,
            min(int(s.top_p * 2.0**64), (1 << 64) - 1),
            int(s.min_p * _ONE),
            seed & (1 << 64) - 1,
            sampler.step,
            s.repeat_penalty,
            s.presence_penalty,
            s.frequency_penalty,
            s.top_k,
            s.top_p < 1,
            s.temperature == 0 or s.top_k == 1,
            s.top_logprobs,
            len(changes),
            0,
        )
        self.stream.to_device(self._settings, packed)

    @staticmethod
    def kind(sampler: "Sampler") -> str:
        """Which launches it takes: "greedy", "choose", or "adjust" where biases or penalties change logits, for which
        `begin` is called before every token."""
        s = sampler.sampling
        if s.adjusts:
            return "adjust"
        return "greedy" if s.is_greedy and not s.top_logprobs else "choose"

    def _changes_of(self, sampler: "Sampler") -> list[tuple[float, int, int, int, int]]:
        s = sampler.sampling
        reach: set[int] = set()
        if s.repeats_count:
            reach.update(sampler._tokens if s.repeat_last_n < 0 else sampler._tokens[-s.repeat_last_n :])
        counts = sampler._counts if s.presence_penalty or s.frequency_penalty else {}
        changed = reach.union(counts, s.logit_bias)
        return [(s.logit_bias.get(t, 0.0), t, counts.get(t, 0), t in reach, t in s.logit_bias) for t in sorted(changed)]

    def _make_room(self) -> None:
        if not self._changes:
            self._changes = self.device.allocate(_CHANGE.size * self.n_vocab, "penalties").address
        if not self._adjusted:
            self._adjusted = self.device.allocate(4 * self.n_vocab, "adjusted logits").address

    # Launches

    def launches(self, kind: str, logits: int, *, dependent: bool, by_mail: bool = True) -> "list[Launch]":
        """The launches of one choice from the logits at an address.

        What is reported goes into the mailbox, for `receive`; without `by_mail` it stays on the device, for `fetch`:
        page-locked memory takes milliseconds to get, which the first token of a process has not.
        """
        if by_mail and self._mailbox is None:
            self._mailbox = self.device.pinned(MAILS * _MAIL.size, "the mailbox")
            self._serials = self._mailbox.view.cast("i")[_MAIL.size // 4 - 1 :: _MAIL.size // 4]
        function, stream, n = self.kernels.function, self.stream, self.n_vocab
        adjusted = logits
        if kind == "adjust":
            self._make_room()
            adjusted = self._adjusted
        at = self._memory.address
        p, mailbox = self.places, self._letters
        if by_mail and self._mailbox is not None:
            mailbox = self._mailbox.device_address
        where = (logits, adjusted, p.control, self._settings, mailbox, p.tokens, p.positions)
        sample = (*where, at, at + 4 * _BLOCKS, at + 8 * _BLOCKS, n)
        blocks = min(_BLOCKS, -(-n // 1024))
        made = [
            function("sample_peak").prepare(
                (blocks, 1, 1), (1024, 1, 1), [_SAMPLE.pack(*sample, kind == "greedy")], stream, dependent=dependent
            )
        ]
        if kind == "adjust":
            wide = (min(-(-n // 256), 1024), 1, 1)
            made.append(
                function("sample_copy").prepare(wide, (256, 1, 1), [adjusted, logits, n], stream, dependent=dependent)
            )
            arguments = [adjusted, logits, self._changes, self._settings]
            made.append(
                function("sample_adjust").prepare((8, 1, 1), (256, 1, 1), arguments, stream, dependent=dependent)
            )
        if kind != "greedy":
            made.append(
                function("sample_choose").prepare(
                    (1, 1, 1), (1024, 1, 1), [_SAMPLE.pack(*sample, 0)], stream, dependent=dependent
                )
            )
        return made

    # Mail

    def queued(self) -> int:
        """Count one more queued choice; its number is what `receive` takes."""
        self._event.record(self.stream)
        self.serial += 1
        return self.serial

    def receive(self, number: int, sampler: "Sampler") -> Sampled:
        """Wait for a mail and tell `sampler`. Raises ReflexError (internal) when the logits have no finite peak."""
        serials, at = self._serials, (number - 1) % MAILS
        spins = 0
        while serials[at] != number:
            spins += 1
            # A kernel that faults never writes; asking for the event raises its error.
            if spins % SPINS == 0 and self._event.done() and serials[at] != number:
                raise DeviceError(f"token {sampler.step} never arrived from the device")
        assert self._mailbox is not None
        return self._opened(self._mailbox.view[at * _MAIL.size : (at + 1) * _MAIL.size], sampler)

    def fetch(self, number: int, sampler: "Sampler") -> Sampled:
        """The same for a choice that was queued without `by_mail`."""
        at = self._letters + (number - 1) % MAILS * _MAIL.size
        return self._opened(self.stream.read(at, _MAIL.size), sampler)

    def _opened(self, mail: "bytes | memoryview", sampler: "Sampler") -> Sampled:
        token, peak, log_sum, best, n_top, *more = _MAIL.unpack(mail)
        if not -_FLOAT32_MAX <= peak <= _FLOAT32_MAX:
            what = "only minus infinity" if peak < 0 else f"{peak} as the logit of token {best}"
            raise ReflexError(f"the model produced {what} at step {sampler.step}: broken weights or an overflow")
        top = tuple((more[i], more[MOST_TOP + i] - peak - log_sum) for i in range(n_top))
        sampler.accept(token)
        return Sampled(token, more[2 * MOST_TOP] - peak - log_sum, top)
