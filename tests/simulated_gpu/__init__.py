"""A simulated GPU and NCCL, in which unmodified `gems.Trainer.step` runs without either.

Tensors on `cuda` are torch's fake tensors: they have shapes, types, strides and devices, and no
numbers. Simulated are streams, events, launches, copies, host synchronisations, the allocator's
bytes, pinned memory, and `torch.distributed` over NCCL (a stream per communicator) and gloo, of
which one rank is real and the others are assumed to do the same. Not simulated: numbers, time,
kernels that a library launches inside of one operator, and streams inside of autograd.

`python -m tests.simulated_gpu LIBRARY` runs the table of `families.py` and prints JSON. It must be
a process of its own: it loads a library before torch, and replaces what is in `torch.cuda` and
`torch.distributed`.
"""
