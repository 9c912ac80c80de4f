"""Text to token ids and back: byte-level byte-pair encoding with the vocabulary and merges of the file.

    text -> control tokens cut out -> NFC, where the models do that -> pieces (pretokenize.py) -> merges (bpe.py) -> ids

A cold start encodes one short prompt, so nothing is built that it does not need: its pieces can ask for a few thousand
merges at most, and those are picked out of the file's list in one pass. The dictionaries of all tokens and merges are
built for a long text, or when a second one comes.
"""

import codecs
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import repeat

from reflex_ipc import bpe
from reflex_ipc.errors import InvalidRequestError, ModelFileError, UnsupportedModelError
from reflex_ipc.gguf import GGUF
from reflex_ipc.pretokenize import PRE_TOKENIZERS, Splitter, nfc

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

_FEW = 20_000  # candidate merges up to which picking them out beats building the dictionary (bench/tokenizer.py)
_CACHED_PIECES = 1 << 16
_CACHED_LENGTH = 64  # characters; longer pieces do not come back

_Specials = Sequence[tuple[str, int]]


class Tokenizer:
    """The tokenizer of a model file; a file with nothing but a vocabulary will do.

    `bos`, `eos`, `eot`: ids, None where the file names none. `eog`: the ids that end an answer. `add_bos`, `add_eos`:
    what the file wants around a prompt. `warnings`: what is odd about the file, or was about a text, for a person.
    """

    __slots__ = (
        "_cache",
        "_dropped",
        "_merges",
        "_path",
        "_rules",
        "_special",
        "_splitter",
        "_tokens",
        "_types",
        "_used",
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
        self._tokens = _Tokens(file, "tokenizer.ggml.tokens")
        self._merges = _Merges(file, "tokenizer.ggml.merges")
        self.n_vocab, self.n_merges = len(self._tokens), len(self._merges)
        self._types = self._read_types(file)
        self.bos = self._read_id(file, "bos")
        self.eos = self._read_id(file, "eos")
        self.eot = self._read_id(file, "eot")
        self.add_bos = self._read_add(file, "bos", self.bos, self._rules.add_bos)
        self.add_eos = self._read_add(file, "eos", self.eos, False)
        self._special = self._read_specials()
        self.eog = self._read_end(file)
        self._user_defined = [(text, id) for text, id in self._special if self._types[id] == _USER_DEFINED]
        self._splitter: Splitter | None = None
        self._used = False
        self._cache: dict[str, list[int]] = {}
        self._dropped: set[int] = set()

    def encode(self, text: str, special: bool = True, bos: bool | None = None) -> list[int]:
        """The ids of a text.

        `special`: control tokens in the text become their ids; without it only user-defined ones do. `bos`: None puts
        BOS in front and EOS at the end if the file wants them (`add_bos`, `add_eos`), True puts BOS, False neither.
        Raises InvalidRequestError for half a surrogate pair.
        """
        if bos and self.bos is None:
            raise InvalidRequestError(f"{self._path} names no BOS token (key 'tokenizer.ggml.bos_token_id')")
        ids = self._encode([(text, self._special if special else self._user_defined)])
        if self.bos is not None and (self.add_bos if bos is None else bos):
            ids.insert(0, self.bos)
        if self.eos is not None and self.add_eos and bos is None:
            ids.append(self.eos)
        return ids

    def encode_parts(self, parts: Iterable[tuple[str, bool]]) -> list[int]:
        """The ids of the texts, joined; no BOS is put in front.

        Control and user-defined tokens are recognised inside the parts that say True, and never across a border.
        Plain text on both sides of a border is one run of text.
        """
        return self._encode([(text, self._special if special else ()) for text, special in parts])

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """The text of the ids; bytes that are not UTF-8 become U+FFFD. Control tokens show if `special`."""
        return b"".join([self.token_bytes(id, special) for id in ids]).decode("utf-8", "replace")

    def token_bytes(self, id: int, special: bool = False) -> bytes:
        """What one token adds to the text. Raises InvalidRequestError for an id the vocabulary does not have."""
        kind = self._types[self._checked(id)]
        text = self._tokens.strings.raw[id]
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

    def is_control(self, id: int) -> bool:
        return self._types[self._checked(id)] == _CONTROL

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
        raw = self._tokens.strings.raw
        specials = []
        for kind in (_UNKNOWN, _CONTROL, _USER_DEFINED):
            id = self._types.find(kind)
            while id >= 0:
                if raw[id]:
                    specials.append((self._tokens.strings[id], id))
                id = self._types.find(kind, id + 1)
        specials.sort(key=lambda special: len(raw[special[1]]), reverse=True)
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

    def _encode(self, parts: Iterable[tuple[str, _Specials]]) -> list[int]:
        if self._splitter is None:
            self._splitter = Splitter(self._rules.rules)
        pieces: list[str | int] = []
        for run in _runs(parts):
            if isinstance(run, int):
                pieces.append(run)
            else:
                pieces += self._splitter.split(nfc(run) if self._rules.nfc else run)
        cache = self._cache
        new = {piece for piece in pieces if isinstance(piece, str) and piece not in cache}
        if new:
            cache.update(self._encode_pieces(new))
        ids: list[int] = []
        for piece in pieces:
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids += cache[piece]
        if len(cache) > _CACHED_PIECES:
            cache.clear()
        else:
            for piece in new:
                if len(piece) > _CACHED_LENGTH:
                    del cache[piece]
        return ids

    def _encode_pieces(self, pieces: Iterable[str]) -> dict[str, list[int]]:
        """The ids of each piece."""
        todo = {piece: [bpe.SYMBOLS[byte] for byte in _utf8(piece)] for piece in pieces}
        few = not self._used and sum(bpe.n_candidates(len(symbols)) for symbols in todo.values()) <= _FEW
        self._used = True
        done: dict[str, list[int]] = {}
        if self._rules.ignore_merges:
            whole = {piece: b"".join(symbols) for piece, symbols in todo.items()}
            found = self._tokens.find(set(whole.values()) if few else None)
            done = {piece: [found[text]] for piece, text in whole.items() if text in found}
            todo = {piece: symbols for piece, symbols in todo.items() if piece not in done}
        ranks = self._merges.find({c for symbols in todo.values() for c in bpe.candidates(symbols)} if few else None)
        merged = {piece: bpe.merge(symbols, ranks) for piece, symbols in todo.items()}
        letters = (symbol for symbols in todo.values() for symbol in symbols)
        found = self._tokens.find({s for symbols in merged.values() for s in symbols}.union(letters) if few else None)
        for piece, symbols in merged.items():
            done[piece] = [id for symbol in symbols for id in self._symbol_ids(symbol, found)]
        return done

    def _symbol_ids(self, symbol: bytes, found: Mapping[bytes, int]) -> Sequence[int]:
        """The id of a symbol; if it is no token, those of its bytes. A byte without a token is lost, with a warning."""
        id = found.get(symbol)
        if id is not None:
            return (id,)
        ids = []
        for letter in symbol.decode():
            id = found.get(letter.encode())
            if id is not None:
                ids.append(id)
            elif bpe.BYTES[letter] not in self._dropped:
                byte = bpe.BYTES[letter]
                self._dropped.add(byte)
                self.warnings.append(f"{self._path}: no token for byte {byte:#04x}: it is dropped from the text")
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


class _Table:
    """Where strings stand in one of the file's long lists."""

    __slots__ = ("_all", "_what", "strings")

    def __init__(self, file: GGUF, key: str) -> None:
        self._what = f"{file.path}: key {key!r}"
        self._all: dict[bytes, int] | None = None
        self.strings = file.strings(key)

    def __len__(self) -> int:
        return len(self.strings)

    def find(self, wanted: set[bytes] | None) -> dict[bytes, int]:
        """The places of those of `wanted` that are there, or of more; None wants all. Of equals, the first counts."""
        if self._all is not None:
            return self._all
        raw = self.strings.raw
        if wanted is not None:
            hits = [(text, i) for i, text in enumerate(raw) if text in wanted]
            found = dict(reversed(hits))
            self._check(found, len(hits))
        else:
            found = dict(zip(reversed(raw), range(len(raw) - 1, -1, -1), strict=True))
            self._check(found, len(raw))
            self._all = found
        return found

    def _check(self, found: dict[bytes, int], n: int) -> None:
        """Refuses a list that makes no sense. `found` was made of n of its strings."""
        raise NotImplementedError


class _Tokens(_Table):
    __slots__ = ()

    def _check(self, found: dict[bytes, int], n: int) -> None:
        if len(found) < n:
            i, text = next((i, text) for i, text in enumerate(self.strings.raw) if found.get(text, i) != i)
            raise ModelFileError(f"{self._what}: entries {found[text]} and {i} are the same token, {text[:64]!r}")


class _Merges(_Table):
    __slots__ = ()

    def _check(self, found: dict[bytes, int], n: int) -> None:
        raw = self.strings.raw
        # Merges without a space are never found by a search, so a search need not pay for looking at all.
        if n == len(raw) and min(map(bytes.find, raw, repeat(b" "), repeat(1)), default=1) < 0:
            i = next(i for i, text in enumerate(raw) if text.find(b" ", 1) < 0)
            raise ModelFileError(f"{self._what}: entry {i}, {raw[i][:64]!r}, is not two symbols with a space between")


def _utf8(piece: str) -> bytes:
    try:
        return piece.encode()
    except UnicodeEncodeError as error:
        code = ord(piece[error.start])
        raise InvalidRequestError(
            f"the text holds U+{code:04X}, half of a surrogate pair, which is no character"
        ) from None


def _runs(parts: Iterable[tuple[str, _Specials]]) -> Iterator[str | int]:
    """The ids of the special tokens in the parts, and the runs of text between them."""
    text: list[str] = []
    for part, specials in parts:
        start = 0
        for first, last, id in _cuts(part, specials):
            text.append(part[start:first])
            if run := "".join(text):
                yield run
            text.clear()
            yield id
            start = last
        text.append(part[start:])
    if run := "".join(text):
        yield run


def _cuts(text: str, specials: _Specials) -> list[tuple[int, int, int]]:
    """(start, end, id) of every special token in the text: the longest are placed first, each from left to right."""
    cuts = []
    taken = bytearray(len(text))
    for special, id in specials:
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
