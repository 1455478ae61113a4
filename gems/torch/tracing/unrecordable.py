"""Why the inside of a module cannot be recorded."""

from __future__ import annotations

REMEDY = (
    "Give it as an nn.Sequential or as a list of stages, each an nn.Module, and GEMS will "
    "partition between those; or move the part that looks at values into a module of its own."
)


class Unrecordable(Exception):
    """The module at `path` must run as it is; if `expectable`, unless a branch is expected."""

    def __init__(self, path: str, reason: str, *, expectable: bool = False) -> None:
        super().__init__(reason)
        self.path, self.reason, self.expectable = path, reason, expectable


def looks_at_values(error: BaseException) -> bool:
    """Whether a run on fake tensors failed because Python wanted to see numbers."""
    return any(word in type(error).__name__ for word in ("DataDependent", "DynamicOutput"))


def reason(error: BaseException) -> str:
    if looks_at_values(error):
        return "it looks at the values of a tensor, which differ from sample to sample"
    line = str(error).strip().splitlines()
    return f"{type(error).__name__}: {line[0]}" if line else type(error).__name__
