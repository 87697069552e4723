"""Execution of a dataflow graph: master, worker groups, recovery and the run directory."""
