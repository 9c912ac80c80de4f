"""Stop strings, against str.find over the whole text."""

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from reflex_ipc.errors import InvalidRequestError
from reflex_ipc.stops import StopStrings


def naive(text: str, stops: list[str]) -> tuple[str, bool]:
    """The answer cut at the stop string that is complete first, from the whole text at once."""
    for end in range(len(text) + 1):
        starts = [text[:end].find(stop) for stop in stops if stop in text[:end]]
        if starts:
            return text[: min(starts)], True
    return text, False


def feed(stops: list[str], pieces: list[str]) -> tuple[list[str], bool, str]:
    watcher = StopStrings(stops)
    out = []
    stopped = False
    for piece in pieces:
        text, stopped = watcher.push(piece)
        out.append(text)
    return out, stopped, watcher.flush()


# Few letters, so that partial and overlapping matches are the rule.
texts = st.text(alphabet="ab\n", max_size=40)
stop_lists = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), max_size=4)


@st.composite
def cut(draw: st.DrawFn) -> list[str]:
    text = draw(texts)
    borders = sorted(draw(st.lists(st.integers(0, len(text)), max_size=10)))
    return [text[a:b] for a, b in zip([0, *borders], [*borders, len(text)], strict=True)]


@given(stop_lists, cut())
@example(["abab", "ba"], ["a", "b", "a"])
@example(["aab"], ["aa", "ab"])
@example(["abcd", "bc"], ["ab", "cd"])
def test_any_cutting_gives_what_find_over_the_whole_text_gives(stops: list[str], pieces: list[str]) -> None:
    out, stopped, rest = feed(stops, pieces)
    assert ("".join(out) + rest, stopped) == naive("".join(pieces), stops)


@given(stop_lists, cut())
def test_what_is_held_back_is_only_what_can_still_become_a_stop_string(stops: list[str], pieces: list[str]) -> None:
    watcher = StopStrings(stops)
    seen = ""
    sent = ""
    for piece in pieces:
        text, stopped = watcher.push(piece)
        seen += piece
        sent += text
        if stopped:
            break
        held = seen[len(sent) :]
        beginnings = [n for stop in stops for n in range(1, len(stop)) if seen.endswith(stop[:n])]
        assert len(held) == max(beginnings, default=0)
        # Every stop string that this text could grow into still can be cut off whole.
        for stop in stops:
            for n in range(1, len(stop)):
                if seen.endswith(stop[:n]):
                    assert held.endswith(stop[:n])


def test_many_random_texts_cut_at_every_character() -> None:
    rng = random.Random(7)
    for _ in range(20_000):
        text = "".join(rng.choices("ab", k=rng.randrange(16)))
        stops = ["".join(rng.choices("ab", k=rng.randrange(1, 6))) for _ in range(rng.randrange(4))]
        out, stopped, rest = feed(stops, list(text))
        assert ("".join(out) + rest, stopped) == naive(text, stops)


def test_text_goes_out_at_once_when_nothing_can_match() -> None:
    watcher = StopStrings(["\n\n", "User:"])
    assert watcher.push("Hello") == ("Hello", False)
    assert watcher.push(" there\n") == (" there", False)
    assert watcher.push("Us") == ("\n", False)
    assert watcher.push("e it.\n") == ("Use it.", False)
    assert watcher.push("\nMore") == ("", True)
    assert watcher.push("after the end") == ("", True)
    assert watcher.flush() == ""


def test_flush_gives_what_was_held_and_only_once() -> None:
    watcher = StopStrings(["<end>"])
    assert watcher.push("a <en") == ("a ", False)
    assert watcher.flush() == "<en"
    assert watcher.flush() == ""


def test_the_stop_string_that_is_complete_first_wins_even_inside_a_longer_one() -> None:
    assert StopStrings(["abcd", "bc"]).push("xabcd") == ("xa", True)
    assert StopStrings(["abc", "bc", "c"]).push("xabc") == ("x", True)


def test_no_stop_strings_hold_nothing_back() -> None:
    watcher = StopStrings([])
    assert watcher.push("abc") == ("abc", False)
    assert watcher.flush() == ""


def test_characters_outside_the_basic_plane_count_as_one() -> None:
    watcher = StopStrings(["🙂" * 256])
    assert watcher.push("🙂" * 255) == ("", False)
    assert watcher.push("🙂") == ("", True)


@pytest.mark.parametrize(
    ("stops", "message"),
    [
        ([""], r"stop\[0\] must be a string of 1 to 256 characters"),
        (["a", "b" * 257], r"stop\[1\] must be a string of 1 to 256"),
        (["a", 3], r"stop\[1\] must be a string"),
        (["a"] * 17, "at most 16 strings"),
        ("abc", "stop must be a list"),
        (None, "stop must be a list"),
        ({"a": 1}, "stop must be a list"),
    ],
)
def test_bad_stop_strings_are_refused_by_name(stops: object, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        StopStrings(stops)  # type: ignore[arg-type]


def test_the_limits_themselves_are_allowed() -> None:
    stops = [chr(ord("a") + i) * 256 for i in range(16)]
    watcher = StopStrings(stops)
    assert watcher.push("a" * 255 + "b" * 255) == ("a" * 255, False)
    assert watcher.push("b") == ("", True)
