"""Limits that tests do not reach by accident."""

from typing import Any

from serve_app.api.door.limits import ApiLimits


def make_limits(**changes: Any) -> ApiLimits:
    return ApiLimits(**({"max_body_bytes": 2**20, "body_timeout_s": 30.0, "request_timeout_s": 600.0} | changes))
