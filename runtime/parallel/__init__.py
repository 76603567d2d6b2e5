"""Engines of several ranks: a process for each, and what rank 0 has to do with the others."""
