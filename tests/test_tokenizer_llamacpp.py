"""SmolLM2's tokens against llama.cpp: the prebuilt `xllamacpp`, asked over its own HTTP server."""

import json
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizer_oracles import Texts

from reflex_ipc.tokenizer import Tokenizer

pytestmark = pytest.mark.model

PAGE = """\
Dear reader,

  this page is of many kinds.  It's "quoted", it isn't   evenly spaced, and WE'LL see what they'd do;
\tit has tabs,\ttrailing blanks,   \r\nand Windows line ends.\r\n\r\n\r

| year | price  |
|------|-------:|
| 1984 | 3.141.592,65 € |
| 2024 | $1,000,000.00  |

def fibonacci(n: int) -> list[int]:
    a, b = 0, 1   # both
    return [(a := b, b := a + b)[0] for _ in range(n)] or None  # 0x1F ** 2 != ~7 << 3

Größe, naïve café, Ångström, Łódź; Ελληνικά και ελληνικά, Русский текст; עברית, العربية ١٢٣,
हिन्दी में क्षत्रिय, ภาษาไทย ไม่มีวรรค;
日本語のテキスト、漢字とカタカナ・ひらがな。한국어 문장입니다.
中文没有空格，标点也不同！ Tiếng Việt có dấu.
cafe\u0301 n\u0303 (decomposed), ﬁ ﬂ ligatures, ½ ² Ⅷ ٣, x\u00a0y\u3000z\u200bw,
🤷🏽\u200d♀️ 🇫🇷 👩\u200d👩\u200d👧, 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𠀀.
<|im_start|>user
Hi<|im_end|>
<|im_start|>assistant
<|endoftext|><reponame><|im_end
SELECT * FROM t WHERE a >= 10 AND b != 'x'; http://a.b/c?d=e&f=%20#g !!!???...$$$ ((([[[{{{<<<>>>}}}]]])))
"""


@pytest.fixture(scope="module")
def ask(smollm2: Path) -> Callable[[str, dict[str, object]], dict[str, object]]:
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(smollm2)
    parameters.n_ctx = 64
    parameters.n_gpu_layers = 0
    parameters.warmup = False
    parameters.verbosity = 0
    server = xllamacpp.Server(parameters)

    def post(endpoint: str, body: dict[str, object]) -> dict[str, object]:
        address = f"{server.listening_address}/{endpoint}"
        request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            answer: dict[str, object] = json.load(response)
        return answer

    return post


def test_pages_of_mixed_text(ask: Callable[..., dict[str, object]], smollm2: Path) -> None:
    tokenizer = Tokenizer.from_gguf(smollm2)
    texts = Texts(seed=4, words=tuple(PAGE.split(" ")))
    pages = [PAGE * 30, *("".join(texts.mixed() for _ in range(20)) for _ in range(150))]
    n_tokens = 0
    for page in pages:
        page = page.replace("\0", "")  # C strings end there
        for special in (True, False):
            body = {"content": page, "add_special": True, "parse_special": special}
            ids = tokenizer.encode(page, special=special)
            assert ids == ask("tokenize", body)["tokens"], ascii(page)
            n_tokens += len(ids)
    assert n_tokens > 100_000


def test_back_to_text(ask: Callable[..., dict[str, object]], smollm2: Path) -> None:
    tokenizer = Tokenizer.from_gguf(smollm2)
    ids = tokenizer.encode(PAGE, special=False)
    assert tokenizer.decode(ids, special=True) == ask("detokenize", {"tokens": ids})["content"] == PAGE
