"""Embeddings of a knowledge graph: the relatives in some families, learnt from a part of the facts, asked for the rest.

A fact is a triple (head, relation, tail). ComplEx (Trouillon et al., 2016) scores it by the real part of sum(head *
relation * conj(tail)). Trainers push gradients of the logistic loss of true triples, and of others, whose tails are not
known as true; inverse relations do the same for heads. All facts about a tenth of the pairs of people are held out.
"""

import numpy as np
import scipy.sparse

import dps
from dps.models import hits_at_k, mean_reciprocal_rank, ranks_of
from dps.sampling import generator, negative_items

RELATIONS = 2 * 6  # parent, sibling, spouse, grandparent, aunt or uncle, cousin; and the inverse of each
FIRST, GENERATIONS, DIM, NEGATIVES, EPOCHS = 40, 5, 32, 6, 30


def families(rng):
    """All facts and their inverses, int64 [facts, 3], and how many people there are."""
    people, couples, parents = np.arange(FIRST), [], []
    for _ in range(GENERATIONS - 1):
        half = len(people) // 2
        pairs = np.stack([people[:half], rng.permutation(people[half : 2 * half])], axis=1)
        couples.append(pairs)
        parents.append(np.repeat(pairs, rng.integers(2, 4, half), axis=0))  # two or three children
        people = people[-1] + 1 + np.arange(len(parents[-1]))
    parent, spouse = np.zeros((2, people[-1] + 1, people[-1] + 1), int)
    spouse[tuple(np.concatenate(couples).T)] = 1
    parent[np.concatenate(parents).T, np.arange(FIRST, len(parent))] = 1
    sibling = parent.T @ parent * (1 - np.eye(len(parent), dtype=int))
    holds = [parent, sibling, spouse, parent @ parent, sibling @ parent, parent.T @ sibling @ parent]
    relation, head, tail = np.nonzero([*holds, *np.transpose(holds, (0, 2, 1))])
    return np.stack([head, relation, tail], axis=1), len(parent)


def answers(facts, people):
    """The true tails of each head and relation, as rows of a CSR matrix."""
    rows = facts[:, 0] * RELATIONS + facts[:, 1], facts[:, 2]
    return scipy.sparse.csr_matrix((np.ones(len(facts)), rows), (people * RELATIONS, people))


def train(trainer, parts, known):
    for facts in trainer.iterate(parts, batch_size=500, epochs=EPOCHS, shuffle=0):
        h, r, t = facts.T
        false = negative_items(h * RELATIONS + r, known, NEGATIVES, generator(trainer, seed=1))
        ids = np.column_stack([r, RELATIONS + np.column_stack([h, t, false])])
        rows = trainer.pull("v", ids.ravel()).view(np.complex64).reshape(*ids.shape, DIM)
        R, H, T = np.split(rows, [1, 2], axis=1)
        error = 1 / (1 + np.exp(-(H * R * T.conj()).real.sum(axis=2, keepdims=True)))
        error[:, 0] -= 1  # now the derivative of the loss by the score
        sums = (error * T).sum(axis=1, keepdims=True)
        gradient = np.concatenate([H.conj() * sums, R.conj() * sums, error * H * R], axis=1)
        trainer.push("v", ids.ravel(), gradient.reshape(-1, DIM).view(np.float32))


if __name__ == "__main__":
    rng = np.random.default_rng(0)
    facts, people = families(rng)
    chances = rng.random((people, people))
    held_out = chances[facts[:, [0, 2]].min(axis=1), facts[:, [0, 2]].max(axis=1)] < 0.1  # all facts about these two
    with dps.LocalCluster(servers=1, trainers=2) as cluster, dps.ParameterServer(cluster) as ps:
        v = ps.table("v", rows=RELATIONS + people, dim=2 * DIM, init=dps.Normal(0.1), optimizer=dps.Adagrad(0.1))
        ps.run(train, rng.permutation(facts[~held_out]), args=(answers(facts[~held_out], people),), progress=False)
        R, P = np.split(v.pull().view(np.complex64), [RELATIONS])
    h, r, t = facts[held_out].T
    print(f"{len(facts)} facts about {people} people, {len(h)} of them held out")
    for name, scores in ("ComplEx", ((P[h] * R[r]) @ P.conj().T).real), ("a guess", rng.random((len(h), people))):
        ranks = ranks_of(scores, t, filtered=answers(facts, people)[h * RELATIONS + r])  # without others that are true
        print(f"{name}: MRR {mean_reciprocal_rank(ranks):.3f}, hits@10 {hits_at_k(ranks, 10):.3f}")
