"""Builds the timeline as one self-contained HTML file.

It contains the console's drawing code, style and data.
"""

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
    """Return the modules as one script.

    A module's exports are visible to the next one without imports.
    """
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
"""Security policy of the file: only its own script and style may run."""


def picture(recordings: Sequence[bytes]) -> bytes:
    """Return the page for recordings in the form of `Recording.to_json`."""
    # A script element ends at any "</script"; JSON can escape "<".
    data = b"[" + b",".join(recordings) + b"]"
    return (
        _PAGE.replace("/*STYLE*/", _STYLE)
        .replace("/*SCRIPT*/", _SCRIPT)
        .encode()
        .replace(b"/*RECORDINGS*/", data.replace(b"<", b"\\u003c"))
    )
