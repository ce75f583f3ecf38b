"""What updates wait for: the norm of all gradients, their scale, and whether they and the loss are finite."""
