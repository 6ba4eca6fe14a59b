"""Request bodies: their fields and the meaning of each. No route, no queue, no engine."""
