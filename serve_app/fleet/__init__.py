"""How requests run across replicas: attempts, failover, routing and links.

Imports neither Ray nor torch.
"""
