"""Observation of runs: metrics, samples, loggers, live view, timeline, report and dashboard."""
