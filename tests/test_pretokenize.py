"""The split rules and the tables of Unicode, against engines that have the published rules and their own tables."""

import random
import re
import subprocess
import sys
import time
import unicodedata
from pathlib import Path

import pytest
import regex
from tokenizer_oracles import PATTERNS, Pieces, Texts, library_rules
from tokenizers import normalizers

from reflex_ipc import errors, pretokenize
from reflex_ipc.errors import Watch
from reflex_ipc.pretokenize import PRE_TOKENIZERS, Splitter, nfc
from reflex_ipc.unicode_tables import NORMALISED, general_class

ROOT = Path(__file__).parents[1]


def test_every_rule_has_an_oracle() -> None:
    assert {pre.rules for pre in PRE_TOKENIZERS.values()} == set(PATTERNS)


@pytest.mark.parametrize("pre", PATTERNS)
def test_split_as_the_published_rules(pre: str) -> None:
    """The original patterns, with the classes of the `regex` package and with those of the models' own library."""
    splitter, oracle, library = Splitter(pre), Pieces(pre), library_rules(pre)
    texts = Texts(seed=1)
    for _ in range(20_000):
        text = texts.short()
        pieces = splitter.split(text)
        assert pieces == oracle.split(text), ascii(text)
        assert pieces == [piece for piece, _ in library.pre_tokenize_str(text)], ascii(text)
        assert "".join(pieces) == text


BORDERING = "  az19\u0431\u0439\uac00\u4e00\u9fa5\u3002\uff0c\uff1a\n\r\t\x0b!$'sre_(`<+"
BORDERING += "\u0301\u0308\u0323\u1161\u11a8\u3000\xa0\x01\u0627\u064b\u05d0\xe9\xab\u20ac\u03b1\u212b\u037e\u1fef"
BORDERING += "\u0e01\u0e33\u0e38\u0e48\u0e3f\u0e50\u0915\u0928\u093c\u094d\u0958\u0964\u0967"
BORDERING += "\u30a2\u304b\u3099\u309b\u30fb\u30fc\u300c"
AT_BORDERS = [
    "a ",
    "Z ",
    "0 ",
    ", ",
    "' ",
    "_ ",
    "] ",
    "\u0439 ",
    "\uac00 ",
    "\u4e00\u3002",
    "\u9fa5\uff0c",
    "\u4e00\uff1f",
    "a\n",
    "1\t",
    "z(",
    "9<",
    "\xe9'",
    "\u03b1.",
    "\u0e01,",
    "\u0e34 ",
    "\u0e50 ",
    "\u0928]",
    "\u094d ",
    "\u0958 ",
    "\u0964 ",
    "\u304b\u3002",
    "\u30fc\uff01",
    "\u30a2=",
    "\u3099 ",
    "\u9fa5\r",
    "\u05d0.",
    "\u0627!",
    "\u064a\n",
]


@pytest.mark.parametrize("pre", PATTERNS)
def test_a_text_may_be_cut_at_every_border(pre: str) -> None:
    """By the published patterns, and behind NFC where there is one: what is before a border and what is behind it make
    the whole."""
    splitter, oracle = Splitter(pre), Pieces(pre)
    is_normalised = any(each.nfc for each in PRE_TOKENIZERS.values() if each.rules == pre)
    texts, rng = Texts(seed=3), random.Random(pre)
    n_cut = 0
    for i in range(6_000):
        text = "".join(rng.choices(BORDERING, k=rng.randrange(2, 16)))
        if i % 2:
            text = texts.short() + text
        text += rng.choice(AT_BORDERS) + "".join(rng.choices(BORDERING, k=rng.randrange(8)))
        for at in [match.end() for match in re.finditer(pretokenize._BORDER, text)]:
            n_cut += 1
            left, right = text[:at], text[at:]
            assert nfc(left) + nfc(right) == nfc(text), ascii(text)
            assert splitter.split(left) + splitter.split(right) == splitter.split(text), ascii(text)
            if is_normalised:
                assert splitter.split(nfc(left)) + splitter.split(nfc(right)) == splitter.split(nfc(text)), ascii(text)
            if i % 8 == 0:
                assert oracle.split(left) + oracle.split(right) == oracle.split(text), ascii(text)
    assert n_cut > 10_000


def test_borders_come_from_the_last_to_the_first_and_may_be_far_apart() -> None:
    assert list(pretokenize.borders("one two three")) == [len("one two"), len("one")]
    assert next(pretokenize.borders("one two three ")) == len("one two three")
    assert list(pretokenize.borders("")) == list(pretokenize.borders(" ")) == list(pretokenize.borders("one")) == []
    assert list(pretokenize.borders("one two" + "!" * 100_000)) == [len("one two"), len("one")]
    assert list(pretokenize.borders("\u4f60\u597d\u3002\u4f60")) == [2]
    for length in (*range(60, 70), *range(570, 580), 5000):
        text = "a " * length
        assert list(pretokenize.borders(text)) == [*range(len(text) - 1, 0, -2)]
        assert list(pretokenize.borders(text + "a")) == [*range(len(text) - 1, 0, -2)]


@pytest.mark.parametrize(
    "text",
    [
        "\u540d\u524d\u306f\u306a\u3093\u3067\u3059\u304b\uff1f\u3042\u308a\u304c\u3068\u3046",
        "\u0928\u092e\u0938\u094d\u0924\u0947 \u0926\u0941\u0928\u093f\u092f\u093e",
        "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 \u0e0a\u0e32\u0e27\u0e42\u0e25\u0e01",
        "\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd. \u05e9\u05dc\u05d5\u05dd",
        "\u0645\u0631\u062d\u0628\u0627 \u0628\u0643. \u0646\u0639\u0645 \u0644\u0627",
        "for(i=0;i<n;i++)a[i]=f(b[i]);",
        "def\tf(x):\n\treturn\tx",
    ],
)
def test_scripts_and_code_have_borders(text: str) -> None:
    assert next(pretokenize.borders(text)) > len(text) // 3


@pytest.mark.parametrize("pre", PATTERNS)
@pytest.mark.parametrize("unit", ["word ", "\u0301\u4e00\u30021x$ ", "a!1", "\u0e01\u30a2!"])
def test_a_long_text_is_the_same_in_segments_and_watched(monkeypatch: pytest.MonkeyPatch, pre: str, unit: str) -> None:
    splitter, text = Splitter(pre), nfc(unit * 700)
    whole = splitter.split(text)
    monkeypatch.setattr(pretokenize, "_LONG_TEXT", 200)
    monkeypatch.setattr(pretokenize, "_SEGMENT", 100)
    parts = list(pretokenize.segments(text))
    assert "".join(parts) == text and (len(parts) > 10) == any(pretokenize.borders(text))
    asked = 0

    def ask() -> None:
        nonlocal asked
        asked += 1

    watch = Watch(lambda: ask())
    monkeypatch.setattr(errors, "ASK_EVERY_S", 0.0)
    assert [piece for part in parts for piece in splitter.split(part, watch)] == whole
    assert splitter.split(text, watch) == whole
    assert asked > 10


@pytest.mark.parametrize("pre", PATTERNS)
@pytest.mark.parametrize("tail", ["", "x", "\u0939"])
def test_split_time_grows_with_the_length(pre: str, tail: str) -> None:
    splitter = Splitter(pre)
    units = (
        " ",
        "\r\n",
        " \n",
        "a",
        "1",
        "!",
        "'s",
        "\u0301",
        "\0",
        " !",
        "\u3000",
        "-\n",
        "\u30a2",
        "\u0939",
        " \u0301",
    )
    for unit in units:
        text = unit * (50_000 // len(unit)) + tail
        start = time.process_time()
        pieces = splitter.split(text)
        assert time.process_time() - start < 2, ascii(
            unit
        )  # 0.1 s at most here; the square of the length would be a minute
        assert "".join(pieces) == text


def test_classes_are_those_of_unicode_16() -> None:
    """Every code point, against a package that knows a later Unicode, and against the interpreter, which may be older.

    What a later version assigned is O here; nothing that was assigned has another class.
    """
    rules = {letter: regex.compile(rf"\p{{{letter}}}") for letter in "LMNPS"} | {"W": regex.compile(r"\s")}
    n_later = 0
    for code in range(0x110000):
        character, ours = chr(code), general_class(code)
        theirs = next((letter for letter, rule in rules.items() if rule.match(character)), "O")
        n_later += theirs != ours
        assert ours in (theirs, "O"), f"U+{code:04X}"
        category = unicodedata.category(character)
        if category != "Cn" and unicodedata.unidata_version < "16.1":
            white = regex.match(r"\s", character)
            assert ours == ("W" if white else "O" if category[0] == "C" else category[0]), f"U+{code:04X}"
    assert general_class(0x1C89) == "L"  # new in 16.0
    assert general_class(0x1C8B) == "O"
    if regex.match(r"\p{L}", "\ua7ce"):  # new in 17.0: does not change ids
        assert n_later > 4000


def test_classes_do_not_come_from_the_interpreter() -> None:
    # Both letters are of Unicode 16.0; an interpreter with 14.0 takes them for unassigned.
    assert Splitter("qwen2").split("a\u1c89\U00010d50b c") == ["a\u1c89\U00010d50b", " c"]


def test_long_s_is_a_contraction_where_case_is_ignored() -> None:
    assert Splitter("qwen2").split("it'\u017f") == ["it", "'\u017f"]
    assert Splitter("gpt-2").split("it'\u017f") == ["it", "'", "\u017f"]


RANGES = [range(int(first, 16), int(last, 16) + 1) for first, _, last in (w.partition("-") for w in NORMALISED.split())]
COMPOSING = [
    [code for touched in RANGES for code in touched if unicodedata.combining(chr(code))],
    # marks that came after Unicode 9.0
    [0x7FD, 0x898, 0x8D3, 0x9FE, 0xC3C, 0x1ABF, 0x1AC1, 0x1DF6, 0x10EAB, 0x10F46, 0x11070, 0x1133B, 0x11938, 0x1E2EC],
    [0x1100, 0x1161, 0x11A8, 0xAC00, 0xAC01],
    [*b"aeoAEO"],
    [0xE9, 0x344, 0x958, 0xF73, 0x2126, 0xF900],
]


def test_nfc_is_that_of_unicode_9() -> None:
    """The interpreter's function would have the two marks change places: it knows U+0898, which came with 14.0."""
    assert unicodedata.normalize("NFC", "x\u0898\u0334") == "x\u0334\u0898"
    assert nfc("x\u0898\u0334") == "x\u0898\u0334"
    assert nfc("e\u0301\u0898e\u0301\u212b\u0958") == "é\u0898éÅ\u0915\u093c"


def composing(texts: Texts) -> str:
    choice = texts.random.choice
    pools = (choice(RANGES if texts.random.random() < 0.3 else COMPOSING) for _ in range(texts.random.randint(1, 16)))
    return "".join(chr(choice(pool)) for pool in pools)


@pytest.mark.parametrize(
    ("long_run", "segment"), [(1000, 1 << 16), (1, 1 << 16), (1, 2), (1000, 3)], ids=["whole", "runs", "both", "parts"]
)
def test_nfc_is_the_models_own(long_run: int, segment: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However a long text is taken apart."""
    monkeypatch.setattr(pretokenize, "_LONG_RUN", long_run)
    monkeypatch.setattr(pretokenize, "_SEGMENT", segment)
    monkeypatch.setattr(pretokenize, "_LONG_TEXT", 4 * segment)
    monkeypatch.setattr(pretokenize, "_MARKS", 3)
    library = normalizers.NFC().normalize_str
    if library("x\u0898\u0334") != "x\u0898\u0334":
        pytest.skip("this release of tokenizers normalises by a later Unicode than the tables")
    texts = Texts(seed=2)
    n_interpreter_differs = 0
    for _ in range(12_000):
        text = composing(texts)
        assert nfc(text) == library(text), ascii(text)
        n_interpreter_differs += unicodedata.normalize("NFC", text) != library(text)
    assert n_interpreter_differs > 50


@pytest.mark.parametrize("unit", ["\u0301\u0323", "\u0f73", "e\u0301", "\u0323\u0f73\u1161"])
def test_nfc_time_grows_with_the_length(unit: str) -> None:
    text = "a" + unit * (400_000 // len(unit))  # the interpreter alone takes a minute and more
    start = time.process_time()
    once = nfc(text)
    assert time.process_time() - start < 5
    assert nfc(once) == once


def test_ascii_needs_no_tables() -> None:
    code = """
import sys
from reflex_ipc.pretokenize import Splitter, nfc
Splitter("qwen2").split(nfc("It's 12 o'clock.\\n"))
print([name for name in ("unicodedata", "reflex_ipc.unicode_tables", "regex", "numpy") if name in sys.modules])
"""
    run = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert run.stdout == "[]\n"
