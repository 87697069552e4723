"""The engine on torch: the network of one role, its master weights and its optimizer."""
