"""What a run shows and leaves: metrics and samples on disk, loggers, the live view, the timeline,
the report.
"""
