"""Joins the HTTP layer and the engine through Ray Serve. Ray is known here and in `app`, nowhere else."""
