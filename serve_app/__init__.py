"""serve_app: LLM serving on Ray Serve with an engine you can read."""

from typing import TYPE_CHECKING, Any

from serve_app.system.version import __version__

__all__ = ["LLM", "RequestOutput", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from serve_app.core.sampling_params import SamplingParams
    from serve_app.engine.llm import LLM, RequestOutput


def __getattr__(name: str) -> Any:
    """Load the public names on first use, so that importing `serve_app.core` stays free of
    torch."""
    if name == "SamplingParams":
        from serve_app.core.sampling_params import SamplingParams

        return SamplingParams
    if name in ("LLM", "RequestOutput"):
        from serve_app.engine import llm

        return getattr(llm, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
