"""What the tokenizer is compared with: the published split rules under other engines, the models' own library, and
texts that hurt."""

import lzma
import random
import unicodedata
from functools import cache
from pathlib import Path

import regex
import tokenizers
from gguf_bytes import BOOL, I32, STRING, U32, array, build, scalar, string
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from reflex_ipc.gguf import GGUF
from reflex_ipc.unicode_tables import general_class

CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376-\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183-\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2-\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)

PATTERNS: dict[str, list[str]] = {
    "qwen2": [CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"],
    "qwen35": [
        CONTRACTION + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "llama-bpe": [
        CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "gpt-2": [GPT2 + r"|\s+"],
    "smollm": [r"\p{N}", GPT2],
    "deepseek-v3": [
        r"\p{N}{1,3}",
        "[一-龥\u3040-ゟ゠-ヿ]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
    "deepseek-llm": [
        r"[\r\n]",
        rf"\s?[{CASED}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        ASIAN,
        r"\p{N}",
    ],
    "deepseek-coder": [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", ASIAN, r"\p{N}"],
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"],
}
"""The rules as they are published; each is applied to what the one before left."""


class Pieces:
    """The rules under the `regex` package."""

    def __init__(self, pre: str) -> None:
        self.rules = [regex.compile(pattern) for pattern in PATTERNS[pre]]

    def split(self, text: str) -> list[str]:
        pieces = [text] if text else []
        for rule in self.rules:
            refined = []
            for piece in pieces:
                end = 0
                for match in rule.finditer(piece):
                    refined += [piece[end : match.start()], match[0]]
                    end = match.end()
                refined.append(piece[end:])
            pieces = [piece for piece in refined if piece]
        return pieces


def library_rules(pre: str) -> pre_tokenizers.PreTokenizer:
    """The rules under the library the models' own tokenizers are files of."""
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(p), "isolated") for p in PATTERNS[pre]])


def library_tokenizer(path: Path, pre: str, *, nfc: bool, ignore_merges: bool = False) -> tokenizers.Tokenizer:
    """The file's vocabulary in that library, set up as the models' own files do."""
    with GGUF.open(path) as file:
        tokens = list(file.strings("tokenizer.ggml.tokens"))
        merges = [tuple(merge.split(" ")) for merge in file.strings("tokenizer.ggml.merges")]
        types = list(file.metadata["tokenizer.ggml.token_type"])
    vocabulary = {token: id for id, token in enumerate(tokens)}
    model = models.BPE(vocabulary, merges, ignore_merges=ignore_merges)
    tokenizer = tokenizers.Tokenizer(model)
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([library_rules(pre), byte_level])
    special = [
        AddedToken(t, normalized=False, special=k == 3) for t, k in zip(tokens, types, strict=True) if k in (3, 4)
    ]
    tokenizer.add_special_tokens([token for token in special if token.special])
    tokenizer.add_tokens([token for token in special if not token.special])
    return tokenizer


def unpack(packed: Path, target: Path) -> Path:
    target.write_bytes(lzma.decompress(packed.read_bytes()))
    return target


def with_pre(source: Path, target: Path, pre: str) -> Path:
    """A vocabulary-only file with another `tokenizer.ggml.pre`."""
    data = source.read_bytes()
    with GGUF.open(source) as file:
        old = scalar("tokenizer.ggml.pre", STRING, file.str("tokenizer.ggml.pre"))
    assert data.count(old) == 1
    target.write_bytes(data.replace(old, scalar("tokenizer.ggml.pre", STRING, pre)))
    return target


def write_vocabulary(
    path: Path,
    tokens: list[str | bytes],
    merges: list[str | bytes] = (),
    types: list[int] | None = None,
    *,
    model: str = "gpt2",
    pre: str | None = "gpt-2",
    leave_out: str = "",
    **numbers: int | bool,
) -> Path:
    """A vocabulary of a few tokens. `numbers`: further keys, `tokenizer.ggml.` left out of their names."""
    entries = [
        scalar("tokenizer.ggml.model", STRING, model),
        array("tokenizer.ggml.tokens", STRING, tokens),
        array("tokenizer.ggml.merges", STRING, list(merges)),
        array("tokenizer.ggml.token_type", I32, [1] * len(tokens) if types is None else types),
    ]
    if pre is not None:
        entries.append(scalar("tokenizer.ggml.pre", STRING, pre))
    for key, number in numbers.items():
        entries.append(scalar(f"tokenizer.ggml.{key}", BOOL if isinstance(number, bool) else U32, number))
    path.write_bytes(build([e for e in entries if not leave_out or not e.startswith(string(leave_out))]))
    return path


HOT = (
    "'sStTrReEvVmMlLdD\u017f  \t\n\r\x0b\x0c\x85\xa0\u3000\u2028\x1c\x1f\x000123aéñǅ٣½Ⅷ!-_~$+<«\u0301\u0940\u0e33"
    "ッ゠・゛\u3099\u3040一龥龦ࠀ가\ufb01\U0001d518\U0001f937\u200d\ufffd\U00020000ՠⴀ\ue000"
)


class Texts:
    """Random texts of characters that rules treat differently, of all of Unicode, and of words.

    Only of characters that every party knows, whatever its version of Unicode.
    """

    def __init__(self, seed: int, words: tuple[str, ...] = ()) -> None:
        self.random = random.Random(seed)
        self.words = words

    def character(self) -> str:
        if self.random.random() < 0.5:
            return self.random.choice(HOT)
        return self.random.choice(characters()[self.random.choice("LLLMNPSZC")])

    def short(self) -> str:
        count = self.random.randint(0, 24)
        if self.random.random() < 0.4:
            return "".join(self.random.choices(HOT, k=count))
        alphabet = [self.character() for _ in range(self.random.randint(1, 8))]
        return "".join(self.random.choice(alphabet) * self.random.choice((1, 1, 1, 2, 3)) for _ in range(count))

    def mixed(self, parts: int = 6) -> str:
        text = ""
        for _ in range(parts):
            text += self.random.choice(self.words) if self.words and self.random.random() < 0.5 else self.short()
            text += self.random.choice(("", "", " ", "\n"))
        return text


@cache
def characters() -> dict[str, list[str]]:
    """By the first letter of their general category, what is assigned for this interpreter and for the tokenizer."""
    by_category: dict[str, list[str]] = {}
    for code in range(0x110000):
        category = unicodedata.category(chr(code))
        if category in ("Cs", "Cn") or (category == "Co" and code > 0xE0FF):
            continue
        if (general_class(code) == "O") == (category[0] == "C"):
            by_category.setdefault(category[0], []).append(chr(code))
    return by_category
