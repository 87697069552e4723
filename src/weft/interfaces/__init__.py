"""Model interfaces: the implementations of model function calls on one role."""
