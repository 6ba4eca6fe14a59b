"""What stands in front of every route: keys, origins, sizes and times of requests, the form of errors."""
