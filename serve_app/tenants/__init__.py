"""API keys, their tenants, and the tenants' limits."""
