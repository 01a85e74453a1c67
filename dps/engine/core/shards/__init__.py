"""The compiled parts of a shard: its key index, rows, optimizers and initial values, its cut and its ledger."""
