"""Measurements. Everything quoted in README and docs comes from here, as ratios of one run."""
