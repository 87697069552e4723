"""Parameters between layouts: which piece goes where (plan), what that costs (traffic), in which
messages (buckets), their exchange (link, messages), and all of it as one call (execute).
"""
