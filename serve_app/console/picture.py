"""The timeline as one HTML file that needs nothing else: the console's own drawing code, its style, and the data."""

import base64
import hashlib
import re
from collections.abc import Sequence
from importlib.resources import files

_FOLDER = files("serve_app.console")
_MODULES = ("timeline-draw.js", "timeline.js")
_PAGE = """\
<!doctype html>
<html lang="en">
<head>
  <meta charset="utf-8">
  <meta name="viewport" content="width=device-width, initial-scale=1">
  <meta name="color-scheme" content="light dark">
  <title>serve_app timeline</title>
  <style>/*STYLE*/</style>
</head>
<body>
<main class="single">
<section aria-labelledby="title"><h1 id="title">What the batch did</h1><div id="view"></div></section>
</main>
<script id="recordings" type="application/json">/*RECORDINGS*/</script>
<script type="module">/*SCRIPT*/</script>
</body>
</html>
"""
_START = """
const replicas = JSON.parse(document.getElementById("recordings").textContent);
const view = new TimelineView(document.getElementById("view"), { following: false });
view.update(replicas, Math.max(...replicas.map((replica) => replica.now)));
view.fit();
"""


def _script() -> str:
    """The modules as one: what one exports, the next finds without importing it."""
    sources = (_FOLDER.joinpath(name).read_text() for name in _MODULES)
    return "".join(re.sub(r"(?m)^import .*\n|^export ", "", source) for source in sources) + _START


_STYLE = _FOLDER.joinpath("style.css").read_text()
_SCRIPT = _script()


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


CONTENT_SECURITY_POLICY = (
    f"default-src 'none'; script-src {_hash(_SCRIPT)}; style-src {_hash(_STYLE)}; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
"""For serving the picture: its own script and style run, nothing else does."""


def picture(recordings: Sequence[bytes]) -> bytes:
    """The page for recordings in `Recording.to_json`'s form."""
    # A script element ends at "</script", wherever it stands; JSON may write "<" another way.
    data = b"[" + b",".join(recordings) + b"]"
    return (
        _PAGE.replace("/*STYLE*/", _STYLE)
        .replace("/*SCRIPT*/", _SCRIPT)
        .encode()
        .replace(b"/*RECORDINGS*/", data.replace(b"<", b"\\u003c"))
    )
