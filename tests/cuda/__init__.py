"""Code paths of a GPU without one: real runs on a device that a CPU stands in for."""
