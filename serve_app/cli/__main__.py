"""`python -m serve_app.cli`: the same command where the script `serve-app` is not installed."""

from serve_app.cli import app

app(prog_name="serve-app")
