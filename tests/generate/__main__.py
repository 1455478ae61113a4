"""Run many cases, one of them again, or one made smaller: see the package."""

from __future__ import annotations

import argparse
import pprint
import sys
from pathlib import Path

from tests.generate.sweep import many, read, table


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.generate")
    parser.add_argument("--cases", type=int, default=10000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60.0, help="until a case is taken as hung")
    parser.add_argument("--out", type=Path, help="results, one line each; gone on from if there")
    parser.add_argument("--case", type=int, action="append", help="only this one, in this process")
    parser.add_argument("--minimise", action="store_true", help="take away what does not matter")
    parser.add_argument("--table", action="store_true", help="only the table of what is there")
    return parser.parse_args()


def main() -> int:
    given = options()
    if given.case:
        return max(one(number, given) for number in given.case)
    out = given.out or Path(f"generated-{given.seed}.jsonl")
    numbers = range(given.first, given.first + given.cases)
    results = {r["case"]: r for r in read(out) if r["case"] in numbers}
    left = [n for n in numbers if n not in results]
    if not given.table:
        many(left, results, out, given.seed, given.seconds, given.jobs)
    return table(results, given.seed)


def one(number: int, given: argparse.Namespace) -> int:
    from tests.generate.cases import draw, shown, smaller
    from tests.generate.known import known
    from tests.generate.models import build
    from tests.generate.run import judge

    case = draw(number, given.seed)
    verdict = judge(case, given.seconds)
    print(f"{verdict.kind}: {verdict.text}\n{verdict.trace}")
    if verdict.failed and given.minimise:
        case = smaller(case, lambda c: judge(c, given.seconds).sort == verdict.sort)
        verdict = judge(case, given.seconds)
        print(f"smallest: {verdict.kind}: {verdict.text}")
    pprint.pprint(shown(case), width=100, sort_dicts=False)
    print(build(case.model))
    for entry in known(case):
        print(f"known: {entry.name}: {entry.reason}")
    return verdict.failed


if __name__ == "__main__":
    sys.exit(main())
