"""Model interfaces, which implement model function calls such as generation and training."""
