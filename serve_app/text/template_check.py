"""Renders a model's chat template once, in a separate process with limits.

A template is a program and may not end.


`python -m serve_app.text.template_check` is that process. It reads {"template": str,
"special_tokens": {...}} from standard input and prints a line when it starts. Then it prints the
problem as one line of JSON, or null.
"""

import json
import resource
import subprocess
import sys
import threading
from collections.abc import Mapping

import jinja2

from serve_app.errors import ConfigError

RENDER_TIMEOUT_S = 10.0
_MAX_BYTES = 2**31
_MESSAGES = [{"role": "user", "content": "Hello"}]


def check_chat_template(template: str | None, special_tokens: Mapping[str, str]) -> None:
    """Raise `ConfigError` if `template` cannot render a plain message in 10 seconds and 2 GiB.

    None means no template. A template that rejects the message with `raise_exception` is valid.
    """
    if template is None:
        return
    request = json.dumps({"template": template, "special_tokens": dict(special_tokens)})
    command = [sys.executable, "-m", "serve_app.text.template_check"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            reason = _ask(process, request)
        finally:
            process.kill()
    if reason is not None:
        raise ConfigError(f"model: its chat template {reason}")


def _ask(process: "subprocess.Popen[str]", request: str) -> str | None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(request + "\n")
    process.stdin.flush()
    process.stdout.readline()
    # Not `communicate`: it would miss data that `readline` has buffered.
    ending = threading.Timer(RENDER_TIMEOUT_S, process.kill)
    ending.start()
    try:
        output = process.stdout.read()
        process.wait()
        if not ending.is_alive():
            return f"did not render a plain message within {RENDER_TIMEOUT_S:g} seconds"
    finally:
        ending.cancel()
    if not output:
        return f"ended the process that rendered it (status {process.returncode})"
    reason: str | None = json.loads(output)
    return reason


def _problem(template: str, special_tokens: Mapping[str, str]) -> str | None:
    from transformers.utils.chat_template_utils import render_jinja_template

    resource.setrlimit(resource.RLIMIT_DATA, (_MAX_BYTES, _MAX_BYTES))
    print(flush=True)
    try:
        render_jinja_template([_MESSAGES], chat_template=template, add_generation_prompt=True, **special_tokens)
    except MemoryError:
        return f"takes more than {_MAX_BYTES >> 30} GiB for a plain message"
    except Exception as error:  # templates may raise any exception
        if type(error) is jinja2.TemplateError:  # raised by the template itself
            return None
        return f"fails on a plain message: {type(error).__name__}: {str(error)[:300]}"
    return None


if __name__ == "__main__":
    given = json.loads(sys.stdin.readline())
    print(json.dumps(_problem(given["template"], given["special_tokens"])), flush=True)
