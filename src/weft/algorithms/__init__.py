"""Losses and advantage estimators, as array code that does not depend on a framework."""
