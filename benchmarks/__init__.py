"""Benchmarks, one command each: `python -m benchmarks.sft`. benchmarks/README.md says what they
measure.
"""
