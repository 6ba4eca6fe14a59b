"""The Prometheus configuration that we ship: valid, about metrics that exist, and every alert seen
to fire."""

from typing import Any

import yaml

from tests.observability.prometheus import DEPLOY, defined_series, metric_names, promtool


def rules(kind: str) -> dict[str, dict[str, Any]]:
    """Recording rules ("record") or alerts ("alert") by name."""
    groups = yaml.safe_load((DEPLOY / "rules.yml").read_text())["groups"]
    return {rule[kind]: rule for group in groups for rule in group["rules"] if kind in rule}


def test_prometheus_takes_the_configuration() -> None:
    promtool("check", "config", str(DEPLOY / "prometheus.yml"))


def test_alerts_fire_when_they_must_and_only_then() -> None:
    promtool("test", "rules", str(DEPLOY / "rules_test.yml"))


def test_every_alert_is_seen_to_fire_and_to_keep_quiet() -> None:
    cases = [
        case
        for test in yaml.safe_load((DEPLOY / "rules_test.yml").read_text())["tests"]
        for case in test["alert_rule_test"]
    ]
    assert {case["alertname"] for case in cases if "exp_alerts" in case} == set(rules("alert"))
    assert {case["alertname"] for case in cases if "exp_alerts" not in case} == set(rules("alert"))


def test_rules_name_series_that_exist() -> None:
    known = defined_series() | set(rules("record"))
    for name, rule in {**rules("record"), **rules("alert")}.items():
        assert metric_names(rule["expr"]) <= known, name
