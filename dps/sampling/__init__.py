"""Random draws for training: negatives, and words that are left out. numpy only; no call goes to a server.

========= ======================================================================================
alias     `AliasTable`: draws by weight, each in constant time
words     the distribution of word2vec's negatives, and which words word2vec keeps
rejection negatives that are not what they stand beside, and items that a user has not seen
seeds     a generator that draws the same numbers when a trainer is run again
========= ======================================================================================
"""

from dps.sampling.alias import AliasTable
from dps.sampling.rejection import negative_items, negatives
from dps.sampling.seeds import generator
from dps.sampling.words import subsample, unigram_table

__all__ = ["AliasTable", "generator", "negative_items", "negatives", "subsample", "unigram_table"]
