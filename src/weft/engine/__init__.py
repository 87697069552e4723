"""Engines: each runs one role's network to score, train and generate."""
