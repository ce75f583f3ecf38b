"""Quantised collectives."""
