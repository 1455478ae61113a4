"""Optional packages, imported when data needs them."""

from __future__ import annotations

import importlib
from typing import Any

from gems.errors import GemsError


def extra(name: str) -> Any:
    """The module of this name, or an error that names the package to install."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0]
        raise GemsError(f"this data needs {package}; `pip install gems-hires[data]`") from error
