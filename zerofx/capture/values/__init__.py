"""Values that a forward reads while it is traced: known ones, checks, collectives."""
