"""The web console at `/`: static files without a build step, and routes that serve them."""
