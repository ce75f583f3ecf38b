"""What a step takes, measured."""
