"""From raw data to int64 keys.

========= ===================================================================
frames    frames of polars, Arrow and others as pandas frames
hashing   stable 64-bit keys for text and categories
localize  the unique feature ids of a batch, and the batch re-indexed to them
========= ===================================================================
"""
