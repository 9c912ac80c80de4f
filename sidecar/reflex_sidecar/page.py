"""The page at `/`: one static file, and the headers that confine it to what it needs."""

import base64
import hashlib
import re
from pathlib import Path

from starlette.responses import Response

_FILE = Path(__file__).with_name("index.html")


def _hashes(html: str, tag: str) -> str:
    """The sources of the page's own inline elements, for its Content-Security-Policy."""
    contents = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    digests = (hashlib.sha256(content.encode()).digest() for content in contents)
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)


def page() -> Response:
    html = _FILE.read_text()
    policy = (
        f"default-src 'none'; script-src {_hashes(html, 'script')}; style-src {_hashes(html, 'style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )
    return Response(
        html,
        media_type="text/html",
        headers={
            "content-security-policy": policy,
            "referrer-policy": "no-referrer",
            "cross-origin-opener-policy": "same-origin",
            "cache-control": "no-cache",
        },
    )
