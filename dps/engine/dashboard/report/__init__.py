"""A run as files: a report in HTML that opens anywhere, and a timeline for Perfetto.

========= ==================================
report    the report
memory    its tables of what servers hold, and of their budgets
svg       its small charts
windows   a run's history as windows of time
timeline  the trace of a run
========= ==================================
"""
