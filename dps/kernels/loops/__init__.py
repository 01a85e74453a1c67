"""The compiled loops of models, vectors, sampling and features. No server and no client needs them.

They are compiled with declarations of the engine's core, for arrays of known dtype and layout (arrays.pxd, bounds.pxd)
and for several generations of processors (clones.h). `dps.kernels` and others check what users pass before they call.
"""
