"""The page in a headless Chromium, in front of a real engine."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from running import Sidecar, engine_command, until

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
PATIENCE_MS = 15_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no Chromium is installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        )
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A tab in which nothing may go wrong, nor the content policy be broken."""
    context = browser.new_context(viewport={"width": 900, "height": 900})
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    yield page
    context.close()
    assert [each for each in complaints if "401" not in each] == []


def send(page: Any, prompt: str, tokens: int, mode: str = "text") -> None:
    page.fill("#prompt", prompt)
    page.fill("#tokens", str(tokens))
    page.select_option("#mode", mode)
    page.click("#send")


def test_a_prompt_and_its_answer(page: Any, child: Sidecar) -> None:
    page.goto(child.url + "/")
    until(lambda: page.evaluate("document.querySelector('#state').textContent.startsWith('llama, cpu')"))
    for mode, path, ask in (
        ("text", "/v1/completions", {"prompt": "Once"}),
        ("chat", "/v1/chat/completions", {"messages": [{"role": "user", "content": "Once"}]}),
    ):
        choice = child.post(path, {**ask, "max_tokens": 40, "temperature": 0}).json()["choices"][0]
        expected = choice["text"] if mode == "text" else choice["message"]["content"]
        send(page, "Once", 40, mode)
        until(lambda: page.evaluate("document.querySelector('#note').textContent.includes('ended by')"))
        assert page.evaluate("document.querySelector('#output').textContent") == expected
        assert "40 tokens" in page.text_content("#note")
        assert page.text_content("#note").endswith("ended by length")
        page.evaluate("document.querySelector('#note').textContent = ''")


def test_the_phases_are_bars(page: Any, child: Sidecar) -> None:
    page.goto(child.url + "/")
    page.wait_for_selector("#start .phase")
    timings = httpx.get(child.url + "/readyz").json()["timings"]
    expected = {name[:-3].replace("_", " "): ms for name, ms in timings.items() if name.endswith("_ms")}
    assert len(expected) >= 3
    rows = page.query_selector_all("#start .phase")
    shown = {row.query_selector("span").text_content(): row for row in rows}
    assert set(shown) == set(expected)
    widths = {name: row.query_selector(".bar").bounding_box()["width"] for name, row in shown.items()}
    longest = max(expected, key=expected.__getitem__)
    for name, ms in expected.items():
        # As wide as its share of the longest, and never so narrow that it can't be seen.
        assert widths[name] == pytest.approx(max(2.0, widths[longest] * ms / expected[longest]), abs=0.6)
    send(page, "Once", 5)
    page.wait_for_selector("#request .phase")
    assert "first token" in page.text_content("#request")


def test_stop(page: Any, child: Sidecar) -> None:
    page.goto(child.url + "/")
    gone = child.metric("reflex_sidecar_client_gone_total")
    # The first text comes while the answer is still being made.
    send(page, "Once upon a time", 4000)
    until(lambda: page.evaluate("document.querySelector('#output').textContent.length > 20"))
    assert page.is_disabled("#send")
    page.click("#stop")
    until(lambda: page.evaluate("document.querySelector('#note').textContent === 'stopped'"))
    until(lambda: child.metric("reflex_sidecar_client_gone_total") == gone + 1)
    until(lambda: child.metric("reflex_sidecar_running") == 0, 2)
    length = page.evaluate("document.querySelector('#output').textContent.length")
    assert page.is_enabled("#send") and page.is_disabled("#stop")
    page.wait_for_timeout(200)
    assert page.evaluate("document.querySelector('#output').textContent.length") == length


def test_errors_are_shown(page: Any, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("letmein")
    with Sidecar(tmp_path, "--key-file", tmp_path / "key", "--", *engine_command("stdio", tiny)) as sidecar:
        page.goto(sidecar.url + "/")
        send(page, "Once", 5)
        page.wait_for_selector("#key", state="visible")
        assert "key is missing or wrong" in page.text_content("#note")
        page.fill("#key", "letmein")
        page.click("#send")
        until(lambda: page.evaluate("document.querySelector('#note').textContent.includes('ended by length')"))
        page.wait_for_selector("#start .phase")


def test_what_a_model_says_is_never_markup(page: Any, tmp_path: Path) -> None:
    engine = [sys.executable, str(Path(__file__).parent / "fake_engine.py"), "markup"]
    text = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    with Sidecar(tmp_path, "--", *engine) as sidecar:
        page.goto(sidecar.url + "/")
        send(page, text, 5)
        until(lambda: page.evaluate("document.querySelector('#note').textContent.includes('ended by boredom')"))
        assert page.evaluate("document.querySelector('#output').textContent") == text + "a"
        assert page.query_selector("#output *") is None
        assert page.title() == "Reflex"


def test_the_policy(browser: Any, child: Sidecar) -> None:
    """What an injected script would try is blocked; the policy allows the page's own elements and nothing else."""
    policy = httpx.get(child.url + "/").headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    page = browser.new_page()
    page.goto(child.url + "/")
    page.evaluate(
        """() => { const script = document.createElement("script");
                   script.append("document.title = 'owned'");
                   document.head.append(script); }"""
    )
    refused = page.evaluate(
        "() => { try { document.body.innerHTML = '<b>x</b>'; return false; } catch { return true; } }"
    )
    assert refused and page.title() == "Reflex"
    elsewhere = page.evaluate("() => fetch('http://127.0.0.1:9/').then(() => 'let', () => 'blocked')")
    assert elsewhere == "blocked"
    framed = page.evaluate(
        """() => new Promise((resolve) => document.addEventListener("securitypolicyviolation",
             (event) => event.effectiveDirective.startsWith("frame") && resolve(event.effectiveDirective))
             || document.body.append(
               Object.assign(document.createElement("iframe"), { src: "https://example.invalid/" })))"""
    )
    assert framed == "frame-src"
    page.close()
