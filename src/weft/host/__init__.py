"""Host functions: rewards, advantages, filters and other CPU nodes of the graph."""
