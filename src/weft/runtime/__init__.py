"""Execution of a run: master, workers, recovery points and run directory."""
