"""Vectors of words, and of vertices by walks."""
