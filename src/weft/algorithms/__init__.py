"""Losses and advantage estimators, written as framework-independent array code."""
