"""`python -m gems` is `gems`."""

from __future__ import annotations

import sys

from gems.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
