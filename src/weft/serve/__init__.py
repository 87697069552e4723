"""`weft serve`: serve a policy and a reward model over HTTP and gRPC."""
