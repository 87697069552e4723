"""Parameters between layouts: which piece goes where (plan), what that costs (traffic), in which messages (buckets, messages, over
a link), as one call (execute)."""
