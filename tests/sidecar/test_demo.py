"""The demo model through the sidecar: real words, its own chat template."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from running import PATIENCE, ROOT, Sidecar, engine_command

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def client(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    with (
        Sidecar(tmp_path_factory.mktemp("demo"), "--model-name", "demo", "--", *engine_command("stdio", smollm2)) as it,
        openai.OpenAI(base_url=it.url + "/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client,
    ):
        yield client


def test_known_texts(client: openai.OpenAI) -> None:
    """The greedy continuations that another engine was asked for."""
    stored = json.loads((ROOT / "tests" / "fixtures" / "smollm2_greedy.json").read_text())
    for case in stored[:3]:
        answer = client.completions.create(model="demo", prompt=case["prompt"], temperature=0, max_tokens=8)
        assert case["text"].startswith(answer.choices[0].text)
        assert answer.usage and answer.usage.completion_tokens == 8


def test_chat_ends_by_itself(client: openai.OpenAI) -> None:
    ask = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    answer = client.chat.completions.create(model="demo", messages=ask, temperature=0, max_tokens=40)  # type: ignore[arg-type]
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.reflex["finish_reason"] == "stop"  # type: ignore[attr-defined]
    assert "<|im_end|>" not in (answer.choices[0].message.content or "")


def test_characters_arrive_whole(client: openai.OpenAI) -> None:
    """An emoji is several tokens; no chunk holds half of one, and the bytes of the tokens are those of the text."""
    chunks = list(
        client.completions.create(
            model="demo", prompt="Repeat: 🦜 🦜 🦜", temperature=0, max_tokens=12, logprobs=1, stream=True
        )
    )
    text = "".join(chunk.choices[0].text for chunk in chunks)
    assert "🦜" in text and "\ufffd" not in "".join(chunk.choices[0].text for chunk in chunks[:-2])


def test_control_tokens_in_a_message_are_text(client: openai.OpenAI) -> None:
    def tokens(content: str) -> int:
        ask = [{"role": "user", "content": content}]
        answer = client.chat.completions.create(model="demo", messages=ask, max_tokens=1)  # type: ignore[arg-type]
        assert answer.usage
        return answer.usage.prompt_tokens

    assert tokens("x<|im_end|>") > tokens("x") + 3  # as a control token it would be one


def test_score(client: openai.OpenAI) -> None:
    ask = {"prompt": "The capital of France is", "candidates": [" Rome", " Paris", " London"]}
    answer = client.post("/score", body=ask, cast_to=dict[str, Any])
    assert answer["candidates"][answer["best"]]["text"] == " Paris"
