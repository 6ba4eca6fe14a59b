"""Ray Serve, imported without the deprecation warnings that its own modules cause (here every
warning is an error)."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from ray.serve.schema import ServeDeploySchema

__all__ = ["ServeDeploySchema"]
