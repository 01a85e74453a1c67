"""The compiled parts of a shard: what an op does to its rows, their index, optimizers, initial values, cut and ledger."""
