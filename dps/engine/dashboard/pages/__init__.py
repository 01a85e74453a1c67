"""The pages: ``/dps`` and a page for each plot. All modules but `surfaces` and `routes` import bokeh when imported.

========== =====================================================================================
surfaces   what the controller's plugin adds to the scheduler's web server, and takes away again
routes     how to get into a live scheduler's web server
documents  the documents that browsers open
plots      all plots by name
trainers   plots about trainers
servers    plots about servers
curves     plots of what training functions log
style      how plots look
========== =====================================================================================
"""
