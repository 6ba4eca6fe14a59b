"""API keys, the tenants that they name, and their limits."""
