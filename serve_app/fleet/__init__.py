"""Runs requests across replicas: attempts, failover, routing and links."""
