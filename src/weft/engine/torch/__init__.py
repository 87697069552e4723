"""The engine on torch: one role's network, its masters and its optimizer."""
