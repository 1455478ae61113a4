"""Pipelines of ours, of torch.distributed.pipelining and none at all, over the same network."""
