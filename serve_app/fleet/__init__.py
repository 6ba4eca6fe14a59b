"""What becomes of a request across replicas: attempts, failover, routing and their links. Knows no Ray, no torch."""
