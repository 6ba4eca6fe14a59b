"""Who sees a replica's metrics: admins of a file that may not be there, and the ingress in any case."""

from pathlib import Path

from serve_app.serving.doors import admits_to_replicas_metrics
from serve_app.settings import IngressSettings
from serve_app.tenants.key_file import add_key, remove_key


def test_a_replica_without_the_keys_file_answers_the_ingress_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    admits = admits_to_replicas_metrics(IngressSettings(keys_file=str(path)), "own key")
    assert admits is not None
    assert [admits(key) for key in ("own key", "", "another")] == [True, False, False]
    admin, other = add_key(path, "admin", {"admin": True}), add_key(path, "other", {})
    assert [admits(key) for key in ("own key", admin, other)] == [True, True, False]
    remove_key(path, "admin")
    assert [admits(key) for key in ("own key", admin)] == [True, False]


def test_without_keys_everybody_sees_it() -> None:
    assert admits_to_replicas_metrics(IngressSettings(), "own key") is None
