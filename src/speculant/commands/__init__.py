"""Subcommands that are too long for `cli`. They too import everything heavy inside functions."""
