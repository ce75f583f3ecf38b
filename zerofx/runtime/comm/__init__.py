"""Collectives, process groups, and agreement between ranks."""
