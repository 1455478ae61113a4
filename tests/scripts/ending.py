"""A rank that ends with a sum under way, while the other waits for a message: no Trainer, only the
transport."""

from __future__ import annotations

import torch

from gems.torch.launch import connect

transport, _ = connect()
transport.all_gather_object("here")
if transport.rank == 0:
    under_way = transport.all_reduce(torch.ones(4), (0, 1))
    error = KeyError("no such label")
    transport.fail(error)
    raise error
transport.irecv(torch.ones(4), 0).wait()
