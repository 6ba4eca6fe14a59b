"""Blocking HTTP requests to our own servers, never through a proxy.

A proxy from the environment must not see requests to this machine or cluster, and could not reach
it. Standard library only, so that every package may import it.
"""

import http.client
import ssl
import urllib.error
import urllib.request

_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _unverified_opener() -> urllib.request.OpenerDirector:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))


_UNVERIFIED_OPENER = _unverified_opener()


class HttpStatusError(OSError):
    """The server answered with a status other than 2xx."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"the server answered {status}")
        self.status = status
        self.body = body


def fetch(
    url: str, *, timeout_s: float, json_body: bytes | None = None, api_key: str | None = None, verify: bool = True
) -> bytes:
    """Return the body of the answer to a GET, or to a POST of `json_body` if given.

    Follows redirects. `timeout_s` limits each read from the socket, not the whole request.
    `verify`: whether to verify the certificate of an `https` server. Raises `HttpStatusError` for a
    status other than 2xx, another `OSError` without a complete answer, and `ValueError` for an
    invalid `url`.
    """
    headers = {} if json_body is None else {"Content-Type": "application/json"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    request = urllib.request.Request(url, json_body, headers)
    try:
        with (_OPENER if verify else _UNVERIFIED_OPENER).open(request, timeout=timeout_s) as answer:
            return bytes(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            raise HttpStatusError(error.code, error.read()) from None
    except http.client.InvalidURL as error:
        raise ValueError(f"{url!r} is not a valid URL") from error
    except http.client.HTTPException as error:
        raise ConnectionError(f"{type(error).__name__}: {error}") from error
