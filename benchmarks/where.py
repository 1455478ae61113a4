"""When and where a table was made."""

from __future__ import annotations

import datetime
import os
import platform

import torch


def where() -> str:
    day, cores = datetime.date.today(), os.cpu_count()
    return f"{day}, {platform.machine()}, {cores} cores, torch {torch.__version__}\n"
