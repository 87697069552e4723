"""Dataflow graph of a run: nodes, edges, scheduling and drawing."""
