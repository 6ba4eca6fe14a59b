"""A model's chat template is tried before the first client meets it, where it can do no harm."""

import pytest

from serve_app.errors import ConfigError
from serve_app.text import template_check
from serve_app.text.template_check import check_chat_template
from serve_app.text.tokenizer import Tokenizer

SOUND = "{% for m in messages %}{{ bos_token }}{{ m['content'] }}{% endfor %}"


@pytest.mark.parametrize("template", [None, SOUND, "{{ raise_exception('system message first') }}"])
def test_a_sound_template_passes(template: str | None) -> None:
    check_chat_template(template, {"bos_token": "<s>"})


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{% for m in messages %}", "TemplateSyntaxError"),
        ("{{ messages[3].content }}", "UndefinedError"),
        ("{{ 'a' * 10**10 }}", "GiB"),
    ],
)
def test_a_broken_template_is_refused_with_its_reason(template: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"chat template .*{reason}"):
        check_chat_template(template, {})


def test_a_template_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_check, "RENDER_TIMEOUT_S", 0.5)
    endless = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"
    with pytest.raises(ConfigError, match="within 0.5 seconds"):
        check_chat_template(endless, {})


def test_the_default_models_template_passes(tokenizer: Tokenizer) -> None:
    tokenizer.check_chat_template()
