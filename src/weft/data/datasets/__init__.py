"""Built-in dataset types."""
