"""Ray Serve's deployments: they join the HTTP layer, the fleet and the engine."""
