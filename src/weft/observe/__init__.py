"""Observation of runs: metrics, samples, loggers, terminal view, timeline, report and dashboard."""
