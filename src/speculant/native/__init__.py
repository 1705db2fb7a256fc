"""Compiled inner loops (C++, no dependency), and plain torch where there is no compiler."""
