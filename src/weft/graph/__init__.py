"""Dataflow graph of a training run: its nodes and edges, their scheduling, and a drawing."""
