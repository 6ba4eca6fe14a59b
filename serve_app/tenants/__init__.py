"""Who may use the server and how much: keys, the tenants that they name, their limits."""
