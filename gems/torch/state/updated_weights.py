"""Around an optimizer step: gradients that several stages sum, their norm, and weights that were
updated on one rank of a shard group."""

from __future__ import annotations

import torch

from gems.torch.state.grad_bucket import restored
from gems.torch.state.rank_weights import RankWeights
from gems.torch.state.sparse_gradients import dense, square


def reduce_tied(weights: RankWeights) -> None:
    """All-reduce the gradients of weights that several stages use, over the ranks of all of
    them."""
    owned = weights.owned
    if not (tied := owned.tied()):
        return
    parameters = weights.named_parameters()
    for name in tied:
        p = parameters.get(name)
        if p is None or not weights.trains(p):
            continue
        gradient = torch.zeros_like(p) if p.grad is None else dense(p.grad)
        flat = torch.cat((gradient.reshape(-1), gradient.new_tensor([p.grad is not None])))
        weights.transport.all_reduce(flat, owned.replica_groups[name]).wait()
        p.grad = restored(flat[:-1], p) if flat[-1].item() else None


def square_norm(weights: RankWeights) -> float:
    """Of the gradients that this rank is the first to have, so that each counts once."""
    shards = weights.shards.values()
    counted = {n for shard in shards if shard.level for n in shard.param_shards} | {
        n for n, ranks in weights.owned.replica_groups.items() if ranks[0] == weights.rank
    }
    here = [
        square(p.grad)
        for name, p in weights.stepped().items()
        if p.grad is not None and name in counted
    ]
    freed = [(n, square) for shard in shards for n, square in shard.grad_squares.items()]
    return sum(here) + sum(square for name, square in freed if name in counted)


def gather_updated(weights: RankWeights) -> None:
    """Each rank has stepped its shards of the weights; where all keep them whole, all get them."""
    to = weights.transport
    shards = [shard for shard in weights.shards.values() if 0 < shard.level < 3]
    resident = [shard for shard in shards if shard.is_unsharded]
    pairs = [(memory, shard.ranks) for shard in resident for memory in shard.flat_weights]
    for handle in [to.all_gather(*pair) for pair in pairs]:
        handle.wait()
    for shard in (x for x in shards if not x.is_unsharded):  # offloaded, one at a time
        for handle in shard.unshard():
            handle.wait()
        for memory in shard.flat_weights:
            to.all_gather(memory, shard.ranks).wait()
        shard.write_back()
        shard.reshard()
