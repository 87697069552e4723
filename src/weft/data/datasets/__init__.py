"""Shipped dataset types."""
