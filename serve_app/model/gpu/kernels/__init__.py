"""All Triton kernels. Requires Triton; only `serve_app.model.gpu` imports this package."""
