"""Parameters between layouts: what goes from rank to rank (plan), what that costs (traffic), in which messages (buckets), done
(execute)."""
