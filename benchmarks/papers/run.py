"""Print the tables of all papers. Everything is simulated, nothing is measured on GPUs.

python -m benchmarks.papers.run                  all of them, about two minutes
python -m benchmarks.papers.run hyfi zero        some
"""

from __future__ import annotations

import argparse
import importlib
from time import perf_counter

PAPERS = (
    "torchgpipe",
    "zerobubble",
    "hyfi",
    "master",
    "equal_memory",
    "hybrid",
    "pathology",
    "zero",
    "twobuffers",
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the tables of papers.")
    parser.add_argument("papers", nargs="*", metavar="PAPER", help=f"of {', '.join(PAPERS)}")
    for name in parser.parse_args().papers or PAPERS:
        paper = importlib.import_module(f"benchmarks.papers.{name}")
        start = perf_counter()
        print(f"## {(paper.__doc__ or '').partition(chr(10))[0]}\n")
        print(paper.report())
        print(f"\n({perf_counter() - start:.0f} s)\n", flush=True)


if __name__ == "__main__":
    main()
