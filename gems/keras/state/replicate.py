"""Before the first step: variables that several ranks hold are the same on all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gems.transport.protocol import Transport


def replicate(
    variables: Mapping[str, Any], groups: Mapping[str, tuple[int, ...]], transport: Transport
) -> None:
    """Every rank of a variable's group takes the value of the first of them."""
    for path, ranks in groups.items():
        if len(ranks) < 2 or transport.rank not in ranks:
            continue
        value = np.asarray(variables[path].value)
        wide = value.astype(np.float64 if value.dtype.kind in "fV" else np.int64).reshape(-1)
        mine = wide if transport.rank == ranks[0] else np.zeros_like(wide)
        transport.all_reduce(mine, ranks).wait()
        variables[path].assign(mine.reshape(value.shape).astype(value.dtype))
