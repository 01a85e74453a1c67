"""The compiled parts of a shard: what an op does to rows, their index, optimizers, initial values, cut and ledger."""
