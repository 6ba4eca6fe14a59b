"""The engine: scheduler and model in one step loop, as a library (`LLM`) and for a server (`AsyncEngine`)."""
