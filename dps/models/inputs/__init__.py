"""What a user has - arrays, frames, files, data of Dask or Spark - as checked pieces for trainers."""
