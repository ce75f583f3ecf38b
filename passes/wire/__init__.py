"""Collectives that send values in few bits."""
