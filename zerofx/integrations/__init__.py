"""Trainers of other libraries that run a step: each module imports its library, and is imported only on demand."""
