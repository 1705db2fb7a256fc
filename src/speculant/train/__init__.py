"""Training draft heads on the target's own answers."""
