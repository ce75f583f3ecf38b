"""What people read: the summary of a step, its schedule, its plan."""
