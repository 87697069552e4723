"""Files in buckets: reading, writing, and local copies. Local paths never come here."""
