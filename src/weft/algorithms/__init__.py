"""Losses and advantage estimators, independent of any deep-learning framework."""
