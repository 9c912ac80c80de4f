"""`reflex bench timeline` of traces that nobody's --trace wrote: refused by event and field, or drawn."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reflex_ipc import waterfall
from reflex_ipc.errors import InvalidRequestError
from reflex_ipc.timings import OUT

_TID = {"ph": "M", "name": "thread_name", "tid": 1, "args": {"name": "main"}}
_SPAN = {"ph": "X", "name": "header", "tid": 1, "ts": 0, "dur": 5e3}
_OUT = {"ph": "i", "name": OUT, "tid": 1, "ts": 5e3}


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([5], "event 0 of the trace: it is no object"),
        ([_TID, _SPAN, None], "event 2 of the trace: it is no object"),
        ([{**_TID, "tid": [1]}], "event 0 ('thread_name') of the trace: tid is not a whole number: [1]"),
        ([{**_TID, "args": 3}], "event 0 of the trace: args.name is missing"),
        ([{**_TID, "args": {"name": 3}}], "args.name is no text: 3"),
        ([_TID, {**_SPAN, "tid": 7}], "event 1 ('header') of the trace: tid is 7, of which no thread_name event"),
        ([_TID, {k: v for k, v in _SPAN.items() if k != "dur"}], "event 1 ('header') of the trace: dur is missing"),
        ([_TID, {**_SPAN, "dur": "5"}], "event 1 ('header') of the trace: dur is not a number of microseconds: '5'"),
        ([_TID, {**_SPAN, "dur": -1}], "dur is -1: it ends before it begins"),
        ([_TID, {**_SPAN, "ts": True}], "ts is not a number of microseconds: True"),
        ([_TID, {**_SPAN, "ts": float("nan")}], "ts is not a number of microseconds: nan"),
        ([_TID, {**_SPAN, "ts": 10**400}], "ts is not a number of microseconds: 1000"),
        ([_TID, {**_SPAN, "name": {"a": 1}}], "event 1 of the trace: name is no text: {'a': 1}"),
        ([_TID, _SPAN, {**_OUT, "ts": []}], "event 2 ('first output') of the trace: ts is not a number"),
        ([_TID, _SPAN, {**_OUT, "ts": 0}], "the trace ends 0 ms after the launch"),
        ([_TID, {**_SPAN, "ts": -9e9}], "there is nothing to draw"),
    ],
    ids=str,
)
def test_an_odd_trace_is_refused_by_event_and_field(events: list[object], words: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        waterfall.draw(json.loads(json.dumps({"traceEvents": events})), "")
    assert words in str(caught.value)


def test_odd_names_are_shown_escaped(tmp_path: Path) -> None:
    file, picture = tmp_path / "odd.json", tmp_path / "odd.svg"
    spans = [{**_SPAN, "name": name} for name in ("\ud800", "\x00\x1b[31m", "blk." + "9" * 5000, "", "<&>")]
    about = {"model": "\ud800\x07", "backend": [1]}
    file.write_text(json.dumps({"traceEvents": [_TID, *spans, {"ph": "C"}, {"ph": []}], "otherData": about}))
    done = timeline(file, picture)
    assert (done.returncode, done.stderr) == (0, "")
    said = done.stdout
    assert "\\ud800" in said and "\\x00\\x1b[31m" in said
    ElementTree.parse(picture)
    file.write_text(json.dumps({"traceEvents": [_TID, _SPAN], "otherData": 5}))
    done = timeline(file, picture)
    assert done.returncode == 2 and "otherData of the trace is no object" in done.stderr


def timeline(file: Path, picture: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "reflex_ipc", "bench", "timeline", str(file), "-o", str(picture)]
    return subprocess.run(command, capture_output=True, text=True)


_ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=()), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)
_FIELDS = ("ph", "name", "tid", "ts", "dur", "args", "cat")


@given(
    st.lists(
        st.sampled_from([_TID, _SPAN, _OUT]).flatmap(
            lambda event: st.dictionaries(st.sampled_from(_FIELDS), _ODD, max_size=2).map(lambda odd: event | odd)
        )
        | _ODD,
        max_size=6,
    )
)
@settings(max_examples=1500, deadline=None)
def test_whatever_a_trace_holds_is_drawn_or_refused(events: list[object]) -> None:
    try:
        picture = waterfall.draw({"traceEvents": [_TID, _SPAN, *events]}, "")
    except InvalidRequestError:
        return
    ElementTree.fromstring(picture)
