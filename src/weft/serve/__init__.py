"""`weft serve`, a policy and a reward model over HTTP and gRPC, and the client of such servers."""
