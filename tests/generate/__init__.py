"""Generated models x plans x optimizers x batches x precisions, against plain PyTorch.

A case is drawn from its number alone, so that it can be run again, and made smaller:

    python -m tests.generate --cases 10000 --seed 0 --jobs 2     # resumable; prints a table
    python -m tests.generate --case 4711 --minimise              # one of them, and its core
"""
