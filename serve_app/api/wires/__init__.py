"""What answers say: for each endpoint, the job that its request is and the form of its answer."""
