"""Ranks that read each other's memory."""
