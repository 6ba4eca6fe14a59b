"""Converts Markdown to HTML that is safe to show.

It runs as a program in its own process (see `rendering`).
Reads one JSON string per line. Answers each with one JSON list of the text's top-level blocks in
order, each as `[first line, HTML]`. Raw HTML in the text is shown as text, and the output has
passed a sanitizer. Images become links, so that showing an answer makes no requests to other
servers.

Does not import serve_app, so that the process starts in under 1 s and needs little memory.
"""

import json
import os
import signal
import sys
from collections.abc import MutableMapping, Sequence
from contextlib import suppress
from html import escape
from typing import Any

import nh3
from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markdown_it.utils import OptionsDict
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from pygments.token import STANDARD_TYPES
from pygments.util import ClassNotFound

_PREFIX = "t-"
_MAX_HIGHLIGHTED = 50_000
_SCHEMES = {"http", "https", "mailto"}
_TAGS = {
    "a", "blockquote", "br", "code", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre", "s",
    "span", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul",
}  # fmt: skip
_ATTRIBUTES = {"a": {"href", "title"}, "ol": {"start"}, "pre": {"data-language"}, "td": {"align"}, "th": {"align"}}
_FORMATTER = HtmlFormatter(nowrap=True, classprefix=_PREFIX)
_CLEANER = nh3.Cleaner(
    tags=_TAGS,
    attributes=_ATTRIBUTES,
    allowed_classes={"span": {_PREFIX + name for name in STANDARD_TYPES.values() if name}},
    url_schemes=_SCHEMES,
    link_rel="noopener noreferrer nofollow",
    set_tag_attribute_values={"a": {"target": "_blank"}},
)


def _is_link(url: str) -> bool:
    """Whether the URL is absolute: a relative one would lead to this server's own routes."""
    return url.lower().startswith(tuple(f"{scheme}:" for scheme in _SCHEMES))


class _Renderer(RendererHTML):
    """markdown-it's renderer, except for code, images and table cells."""

    def fence(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: MutableMapping[str, Any]) -> str:
        words = tokens[idx].info.split()
        return _code(tokens[idx].content, words[0] if words else "")

    def code_block(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: MutableMapping[str, Any]) -> str:
        return _code(tokens[idx].content, "")

    def image(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: MutableMapping[str, Any]) -> str:
        token = tokens[idx]
        url = str(token.attrs["src"])
        text = self.renderInlineAsText(token.children, options, env) or url
        return f'<a href="{escape(url)}">{escape(text)}</a>'

    @staticmethod
    def renderAttrs(token: Token) -> str:
        # The page's security policy forbids style attributes.
        style = str(token.attrs.pop("style", ""))
        if style.startswith("text-align:"):
            token.attrs["align"] = style.removeprefix("text-align:")
        return RendererHTML.renderAttrs(token)


_MARKDOWN = (
    MarkdownIt("commonmark", {"html": False, "breaks": True}, renderer_cls=_Renderer)
    .disable(["html_block", "html_inline"])
    .enable(["table", "strikethrough"])
)
_MARKDOWN.validateLink = _is_link  # type: ignore[method-assign]


def _code(text: str, language: str) -> str:
    shown = escape(text)
    if language and len(text) <= _MAX_HIGHLIGHTED:
        with suppress(ClassNotFound):
            shown = highlight(text, get_lexer_by_name(language, stripnl=False, ensurenl=False), _FORMATTER)
    return f'<pre data-language="{escape(language)}"><code>{shown}</code></pre>'


def blocks(text: str) -> list[tuple[int, str]]:
    """Return the text's top-level blocks: (first line counted from 0, HTML)."""
    env: dict[str, Any] = {}
    tokens = _MARKDOWN.parse(text, env)
    found: list[tuple[int, str]] = []
    start = depth = 0
    for i, token in enumerate(tokens):
        depth += token.nesting
        if depth == 0:
            lines = tokens[start].map or [0]
            html = _MARKDOWN.renderer.render(tokens[start : i + 1], _MARKDOWN.options, env)
            found.append((lines[0], _CLEANER.clean(html)))
            start = i + 1
    return found


def main(limit_s: float) -> None:
    """Answer line by line until the input ends, or a text needs more CPU time than `limit_s`."""
    os.nice(10)  # lower priority than engines and ingress
    for line in sys.stdin.buffer:
        # SIGPROF ends the process at any point. A Python handler would not run during a regular
        # expression.
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        answer = json.dumps(blocks(json.loads(line)))
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(answer.encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]))
