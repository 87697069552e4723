"""Engine on torch, with the network of one role, its master weights and its optimizer."""
