"""Files in buckets: reading, writing, local copies and views, and the lock of a run."""
