"""From raw data to int64 keys.

========= ===================================================================
hashing   stable 64-bit keys for text and categories
localize  the unique feature ids of a batch, and the batch re-indexed to them
========= ===================================================================
"""
