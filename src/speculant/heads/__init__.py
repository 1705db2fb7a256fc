"""Draft heads: modules and their configs, shared by drafting, training and export."""
