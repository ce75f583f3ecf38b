"""Trainers of other libraries around a step: each module imports its library, and is imported only on demand."""
