"""`weft serve`: a policy and a reward model behind HTTP and gRPC."""
