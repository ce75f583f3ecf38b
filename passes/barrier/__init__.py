"""Conditions on all gradients that updates wait for: their norm, their scale, and that they and the loss are finite."""
