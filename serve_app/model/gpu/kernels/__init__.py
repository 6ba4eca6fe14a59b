"""All Triton kernels. Importing requires Triton; only `serve_app.model.gpu` imports this package."""
