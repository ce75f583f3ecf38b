"""Analyses of a captured graph that decisions start from: saved activations, loss heads, rows, chains, pieces."""
