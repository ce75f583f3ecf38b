"""What is taken from torch's private modules outside capture and Inductor: one place to look at when torch changes."""
