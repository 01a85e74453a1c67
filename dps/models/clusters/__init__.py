"""Clusters of rows, and the rows that are most like a row."""
