"""All code in Triton's language. Imports Triton; only `serve_app.model.gpu` imports this package."""
