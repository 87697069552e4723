"""Split one network over several ranks, without changes to the network's own modules."""
