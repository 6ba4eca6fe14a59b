"""The gauges of what a process holds for others."""

from prometheus_client import CollectorRegistry

from serve_app.observability.held_bytes import HeldBytes, register_held_bytes


def test_each_kind_has_a_figure_of_now_beside_its_bound() -> None:
    registry = CollectorRegistry()
    held = 3
    register_held_bytes(registry, {"outputs": HeldBytes(lambda: held, 64), "bodies": HeldBytes(lambda: 0, 128)})
    assert registry.get_sample_value("serve_app_held_bytes", {"kind": "outputs"}) == 3
    assert registry.get_sample_value("serve_app_held_bytes_limit", {"kind": "outputs"}) == 64
    held = 5
    assert registry.get_sample_value("serve_app_held_bytes", {"kind": "outputs"}) == 5
    assert registry.get_sample_value("serve_app_held_bytes_limit", {"kind": "bodies"}) == 128
