"""OpenAI's wire formats over FastAPI. Knows a `Service` that generates, and neither Ray nor the engine."""
