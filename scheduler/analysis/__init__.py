"""What a graph offers to decide on: saved values, rows, chains, pieces."""
