"""Capture a few repeated layers, and put in the others."""
