"""Prometheus counters by API key, only for keys that the keys file names."""

from prometheus_client import CollectorRegistry, Counter


class KeyMetrics:
    """Updated by the HTTP layer on the event loop."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "serve_app_key_requests", "Requests of an API key by how they ended", ["key", "outcome"], registry=registry
        )
        self._tokens = Counter(
            "serve_app_key_tokens",
            "Tokens computed for an API key; `cached` tokens are prompt tokens too",
            ["key", "kind"],
            registry=registry,
        )

    def charged(self, key: str, outcome: str, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> None:
        """Record an ended request of `key`.

        Unknown clients and the launcher are skipped: their names are not valid in a keys file.
        """
        if not key[:1].isalnum():
            return
        self._requests.labels(key, outcome).inc()
        for kind, count in (("prompt", prompt_tokens), ("cached", cached_tokens), ("output", output_tokens)):
            self._tokens.labels(key, kind).inc(count)
