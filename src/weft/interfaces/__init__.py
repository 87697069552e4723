"""Model interfaces: implementations of the model function calls on a role."""
