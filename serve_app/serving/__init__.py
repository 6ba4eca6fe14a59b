"""Ray Serve deployments that connect the HTTP layer, the fleet and the engine."""
