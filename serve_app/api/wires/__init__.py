"""The endpoints: each has a job (the parsed request) and a wire (the answer's format)."""
