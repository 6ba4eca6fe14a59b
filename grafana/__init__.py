"""Grafana's dashboards as code, and the JSON that it makes (`python -m grafana`)."""
