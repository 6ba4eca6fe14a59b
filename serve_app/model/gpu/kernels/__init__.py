"""Everything written in Triton's language. Imports Triton, so nothing outside `serve_app.model.gpu` imports it."""
