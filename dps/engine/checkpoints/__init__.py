"""A model as files: each server writes its shards, and a manifest makes them one checkpoint.

=========== ===============================================================
store       the directory of checkpoints: begin, commit, list, prune
manifest    what makes a directory of shard files a checkpoint
shard_file  one shard as a safetensors file, a piece at a time
local_disk  fsync, and large files past the page cache
reading     the rows of a shard from a full checkpoint and its increments
export      a table as numpy, pandas, scipy.sparse, Parquet or dask
=========== ===============================================================
"""
