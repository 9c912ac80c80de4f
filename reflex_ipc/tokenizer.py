"""Text to token ids and back: byte-level byte-pair encoding with the vocabulary and merges of the file.

    text -> control tokens cut out -> NFC, where the models do that -> pieces (pretokenize.py) -> merges (bpe.py) -> ids

Nothing here needs NumPy or a regular expression library, and ASCII text needs no table of Unicode.
"""

import codecs
import os
import re
from collections.abc import Iterable, Iterator, Sequence

from reflex_ipc import bpe
from reflex_ipc.errors import (
    ContextOverflowError,
    InvalidRequestError,
    ModelFileError,
    UnsupportedModelError,
    Watch,
)
from reflex_ipc.gguf import GGUF
from reflex_ipc.pretokenize import PRE_TOKENIZERS, Splitter, borders, nfc, segments

TYPE_CHECKING = False
if TYPE_CHECKING:
    from reflex_ipc.errors import Poll

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # tokenizer.ggml.token_type; 0 is undefined

_END_TEXTS = (
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|calls|> <|flush|> <end_of_turn> <|endoftext|> </s> <|eom_id|> "
    "<EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> "
    "<｜end▁of▁sentence｜> [e~["
)
"""What ends an answer by its text; files name one such token at best."""

_END_KEYS = {  # what ends an answer by its key, or else by these texts
    "eos": "",
    "eot": "",
    "eom": "",
    "fim_pad": "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]",
    "fim_rep": "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>",
    "fim_sep": "<|file_sep|>",
}

_LONG_TEXT = 1 << 16  # characters; looking for a special token in so many takes some ten microseconds

_BORDER_PATIENCE = 1 << 18  # characters compared; some ten milliseconds at most

_Specials = Sequence[tuple[str, int]]


class Tokenizer:
    """The tokenizer of a model file; a file with nothing but a vocabulary will do.

    `bos`, `eos`, `eot`: ids, None where the file names none. `eog`: the ids that end an answer. `add_bos`, `add_eos`:
    what the file wants around a prompt. `warnings`: what is odd about the file, or was about a text, for a person.
    """

    __slots__ = (
        "_around",
        "_firsts",
        "_pairs",
        "_path",
        "_rules",
        "_special",
        "_splitter",
        "_tokens",
        "_types",
        "_user_defined",
        "add_bos",
        "add_eos",
        "bos",
        "eog",
        "eos",
        "eot",
        "n_merges",
        "n_vocab",
        "pre",
        "warnings",
    )

    @classmethod
    def from_gguf(cls, source: "str | os.PathLike[str] | GGUF") -> "Tokenizer":
        """Raises ModelFileError (a bad file) or UnsupportedModelError (not byte-level BPE, unknown split rules)."""
        if isinstance(source, GGUF):
            return cls(source)
        with GGUF.open(source) as file:
            return cls(file)

    def __init__(self, file: GGUF) -> None:
        self._path = file.path
        self.warnings: list[str] = []
        model = file.str("tokenizer.ggml.model")
        if model != "gpt2":
            raise UnsupportedModelError(
                f"{self._path}: key 'tokenizer.ggml.model' is {model!r}; only 'gpt2' (byte-level BPE) is supported"
            )
        self._read_pre(file)
        self._tokens = file.strings("tokenizer.ggml.tokens")
        merges = file.strings("tokenizer.ggml.merges")
        self.n_vocab, self.n_merges = len(self._tokens), len(merges)
        self._types = self._read_types(file)
        self.bos = self._read_id(file, "bos")
        self.eos = self._read_id(file, "eos")
        self.eot = self._read_id(file, "eot")
        self.add_bos = self._read_add(file, "bos", self.bos, self._rules.add_bos)
        self.add_eos = self._read_add(file, "eos", self.eos, False)
        self._special = self._read_specials()
        self._firsts = "".join({text[0] for text, _ in self._special})
        self._around: _Around | None = None  # once a text is to be cut
        self.eog = self._read_end(file)
        self._user_defined = [(text, id) for text, id in self._special if self._types[id] == _USER_DEFINED]
        self._splitter = Splitter(self._rules.rules)
        self._pairs = bpe.BytePairs(self._path, self._tokens, merges, self._rules.ignore_merges)

    def encode(self, text: str, special: bool = True, bos: bool | None = None, poll: "Poll | None" = None) -> list[int]:
        """The ids of a text.

        `special`: control tokens in the text become their ids; without it only user-defined ones do. `bos`: None puts
        BOS in front and EOS at the end if the file wants them (`add_bos`, `add_eos`), True puts BOS, False neither.
        Raises InvalidRequestError for half a surrogate pair, CancelledError or DeadlineError where `poll` says so.
        """
        if bos and self.bos is None:
            raise InvalidRequestError(f"{self._path} names no BOS token (key 'tokenizer.ggml.bos_token_id')")
        specials = self._special if special else self._user_defined
        watch = Watch(poll)
        ids = self._ids(self._pieces([(text, self._possible(text, specials))], watch), watch)
        if self.bos is not None and (self.add_bos if bos is None else bos):
            ids.insert(0, self.bos)
        if self.eos is not None and self.add_eos and bos is None:
            ids.append(self.eos)
        return ids

    def check_length(self, text: str, n_tokens: int, what: str = "the prompt", field: str | None = None) -> None:
        """Raises ContextOverflowError for a text that is longer than any `n_tokens` tokens can spell."""
        # A character is a byte or more, and normalisation makes one out of four at most, of two bytes or more.
        if len(text) > 64 * n_tokens and len(text) > 2 * n_tokens * max(map(len, self._tokens.raw)):
            raise ContextOverflowError(
                f"{what} has {len(text):,} characters, more than the {n_tokens} tokens of the context can spell", field
            )

    def encode_parts(self, parts: Iterable[tuple[str, bool]], poll: "Poll | None" = None) -> list[int]:
        """The ids of the texts, joined; no BOS is put in front.

        Control and user-defined tokens are recognised inside the parts that say True, and never across a border.
        Plain text on both sides of a border is one run of text.
        """
        watch = Watch(poll)
        return self._ids(self._pieces(self._cuttable(parts), watch), watch)

    def look_up(self, texts: Iterable[Iterable[tuple[str, bool]]], poll: "Poll | None" = None) -> None:
        """Look for the pieces of several texts, each as for `encode_parts`, at once, which then finds them known.

        A short text is looked for in the file's lists, from the front; for many that takes hardly longer than for one.
        Once there are dictionaries, nothing is searched, and this does nothing.
        """
        if self._pairs.is_prepared:
            return
        watch = Watch(poll)
        self._ids([piece for parts in texts for piece in self._pieces(self._cuttable(parts), watch)], watch)

    def border(self, text: str) -> int:
        """The last place where a text may be cut so that its ids are those of the two parts, whatever follows; or 0.

        Neither a piece (`pretokenize.borders`) nor a special token has characters on both sides of it. It is 0 as well
        where that would take long to see, behind thousands of special tokens or very long ones.
        """
        if self._around is None:
            self._around = _Around([text for text, _ in self._special], self._firsts)
        end, patience = len(text), _BORDER_PATIENCE
        for at in borders(text):
            if at > end:  # inside the special token that begins there, as places behind it are
                continue
            end, patience = self._around.start(text, at, patience)
            if end == at:
                return at
            if patience < 0:
                break
        return 0

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """The text of the ids; bytes that are not UTF-8 become U+FFFD. Control tokens show if `special`."""
        return b"".join([self.token_bytes(id, special) for id in ids]).decode("utf-8", "replace")

    def token_bytes(self, id: int, special: bool = False) -> bytes:
        """What one token adds to the text. Raises InvalidRequestError for an id the vocabulary does not have."""
        kind = self._types[self._checked(id)]
        (text,) = self._tokens.cut(id, id + 1)
        if kind in (_CONTROL, _UNKNOWN):
            return text if special else b""
        if kind == _UNUSED:
            return b""
        if kind == _USER_DEFINED:
            return text
        try:
            return bytes([bpe.BYTES[letter] for letter in text.decode()])
        except (KeyError, UnicodeDecodeError):  # not in the letters of bytes: it means itself
            return text

    def prepare(self) -> None:
        """Makes the dictionaries of all tokens and merges that a first short text does without; 50 ms for 150,000.

        Raises ModelFileError if tokens are equal or a merge is not two symbols.
        """
        self._pairs.prepare()

    def decoder(self, special: bool = False) -> "Decoder":
        """For ids that come one by one."""
        return Decoder(self, special)

    def _checked(self, id: int) -> int:
        if not 0 <= id < self.n_vocab:
            raise InvalidRequestError(f"token id {id} is not in the vocabulary: it has 0 to {self.n_vocab - 1}")
        return id

    def _read_pre(self, file: GGUF) -> None:
        self.pre = file.str("tokenizer.ggml.pre", "")
        if not self.pre:
            self.pre = "default"
            self.warnings.append(
                f"{self._path}: key 'tokenizer.ggml.pre' is missing; the text is split by general rules, "
                "which may not be the model's: convert the model again"
            )
        if self.pre not in PRE_TOKENIZERS:
            raise UnsupportedModelError(
                f"{self._path}: key 'tokenizer.ggml.pre' is {self.pre!r}, for which no split rules are known here; "
                f"known are {', '.join(PRE_TOKENIZERS)}"
            )
        self._rules = PRE_TOKENIZERS[self.pre]

    def _read_types(self, file: GGUF) -> bytearray:
        """The type of each token."""
        key = "tokenizer.ggml.token_type"
        view = file.metadata.get(key)
        if not isinstance(view, memoryview) or view.format not in "bBhHiIqQ":
            raise ModelFileError(f"{self._path}: key {key!r} is missing or no array of integers")
        if len(view) != self.n_vocab:
            raise ModelFileError(f"{self._path}: key {key!r} has {len(view)} entries for {self.n_vocab} tokens")
        data, size = view.tobytes(), view.itemsize
        types = bytearray(data[::size])
        if types.translate(None, bytes(range(_BYTE + 1))) or any(data[i::size].strip(b"\0") for i in range(1, size)):
            i, wrong = next((i, kind) for i, kind in enumerate(view) if not 0 <= kind <= _BYTE)
            raise ModelFileError(f"{self._path}: key {key!r}: entry {i} is {wrong}, which is no token type")
        return types

    def _read_id(self, file: GGUF, name: str) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        id = file.int(key, None)
        if id is not None and not 0 <= id < self.n_vocab:
            raise ModelFileError(f"{self._path}: key {key!r} is {id}, but there are {self.n_vocab} tokens")
        return id

    def _read_add(self, file: GGUF, name: str, id: int | None, default: bool) -> bool:
        key = f"tokenizer.ggml.add_{name}_token"
        add = file.bool(key, default)
        if add and id is None:
            self.warnings.append(
                f"{self._path}: a prompt should have {name.upper()}, but key 'tokenizer.ggml.{name}_token_id' "
                "is missing: none is added"
            )
            return False
        return add

    def _read_specials(self) -> _Specials:
        """What is cut out of a text before anything else, the longest first."""
        specials: list[tuple[str, int]] = []
        for run in re.finditer(bytes([*b"[", _UNKNOWN, _CONTROL, _USER_DEFINED, *b"]+"]), self._types):
            first, last = run.span()
            specials += [(text, id) for id, text in enumerate(self._tokens[first:last], first) if text]
        specials.sort(key=lambda special: len(special[0].encode()), reverse=True)
        return specials

    def _read_end(self, file: GGUF) -> frozenset[int]:
        """The ids that end an answer: those that keys name, and special tokens that are known by their text.

        The latter are control tokens, even if the file calls them user-defined. A normal token never ends an answer,
        whatever it looks like: `</s>` of the Qwen vocabularies is HTML.
        """
        end = set()
        texts = _END_TEXTS.split()
        for name, instead in _END_KEYS.items():
            id = self._read_id(file, name)
            if id is None:
                texts += instead.split()
            else:
                end.add(id)
        known = dict(self._special)
        for id in {known[text] for text in texts if text in known}:
            self._types[id] = _CONTROL
            end.add(id)
        return frozenset(end)

    def _possible(self, text: str, specials: _Specials) -> _Specials:
        """The special tokens that a text may hold: none, without a character that one begins with."""
        return specials if any(map(text.__contains__, self._firsts)) else ()

    def _cuttable(self, parts: Iterable[tuple[str, bool]]) -> list[tuple[str, _Specials]]:
        return [(text, self._possible(text, self._special) if special else ()) for text, special in parts]

    def _pieces(self, parts: Iterable[tuple[str, _Specials]], watch: Watch) -> list[str | int]:
        splitter, normalise = self._splitter, self._rules.nfc
        pieces: list[str | int] = []
        for run in _runs(parts, watch):
            if isinstance(run, int):
                pieces.append(run)
                continue
            for text in segments(run):
                pieces += splitter.split(nfc(text, watch) if normalise else text, watch)
                watch()
        return pieces

    def _ids(self, pieces: list[str | int], watch: Watch) -> list[int]:
        lost = len(self._pairs.dropped)
        ids = self._pairs.encode(pieces, watch)
        if len(self._pairs.dropped) > lost:
            bytes_ = " ".join(f"{byte:02x}" for byte in sorted(self._pairs.dropped))
            self.warnings.append(f"{self._path}: the vocabulary has no token for these bytes; they are lost: {bytes_}")
        return ids


class Decoder:
    """Tokens to text, one by one: only whole characters come out, and in the end every byte has."""

    __slots__ = ("_special", "_tokenizer", "_utf8")

    def __init__(self, tokenizer: Tokenizer, special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, id: int) -> str:
        """The text that is complete with this token; bytes that can no longer become UTF-8 are U+FFFD."""
        return self._utf8.decode(self._tokenizer.token_bytes(id, self._special))

    @property
    def pending(self) -> bytes:
        """The bytes of a character that is not complete yet."""
        return self._utf8.getstate()[0]

    def finish(self) -> str:
        """What is pending, as U+FFFD."""
        return self._utf8.decode(b"", final=True)


class _Around:
    """Special tokens that a place in a text may be inside of."""

    __slots__ = ("_by_length", "_firsts")

    def __init__(self, specials: Iterable[str], firsts: str) -> None:
        """`firsts`: every character that one begins with."""
        by_length: dict[int, set[str]] = {}
        for special in specials:
            by_length.setdefault(len(special), set()).add(special)
        self._by_length = sorted(by_length.items(), reverse=True)
        self._firsts = frozenset(firsts)

    def start(self, text: str, at: int, patience: int) -> tuple[int, int]:
        """Where the first special token begins that has characters on both sides of the place, or may have, by what
        follows the text; or the place itself. And what is left of the patience, below 0 if that was too little."""
        longest = self._by_length[0][0] if self._by_length else 0
        for first in range(max(0, at - longest), at):
            patience -= 1
            if text[first] not in self._firsts:
                continue
            for length, specials in self._by_length:
                if length <= at - first:
                    break
                part = text[first : first + length]
                if len(part) == length:
                    patience -= length
                    is_there = part in specials
                else:
                    patience -= length * len(specials)
                    is_there = any(special.startswith(part) for special in specials)
                if is_there or patience < 0:
                    return first, patience
        return at, patience


def _runs(parts: Iterable[tuple[str, _Specials]], watch: Watch) -> Iterator[str | int]:
    """The ids of the special tokens in the parts, and the runs of text between them."""
    text: list[str] = []
    for part, specials in parts:
        start = 0
        for first, last, id in _cuts(part, specials, watch):
            text.append(part[start:first])
            if run := "".join(text):
                yield run
            text.clear()
            yield id
            start = last
        text.append(part[start:])
    if run := "".join(text):
        yield run


def _cuts(text: str, specials: _Specials, watch: Watch) -> list[tuple[int, int, int]]:
    """(start, end, id) of every special token in the text: the longest are placed first, each from left to right."""
    if not specials:
        return []
    cuts = []
    taken = bytearray(len(text))
    is_long = len(text) > _LONG_TEXT
    for special, id in specials:
        if is_long:
            watch()
        first = text.find(special)
        while first >= 0:
            last = first + len(special)
            if taken.find(1, first, last) < 0:
                taken[first:last] = b"\1" * len(special)
                cuts.append((first, last, id))
                first = text.find(special, last)
            else:
                first = text.find(special, first + 1)
    cuts.sort()
    return cuts
