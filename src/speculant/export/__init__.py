"""Heads in the formats of other engines: written, read back and checked."""
