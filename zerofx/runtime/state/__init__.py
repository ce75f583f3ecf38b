"""Parameters and optimizer states in slices."""
