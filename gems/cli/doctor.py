"""`gems doctor`: find out whether GEMS works on this machine, and write one report file.

It prints devices and versions, sets up all links, times messages, and trains two steps under a plan
of each family beside the plain loop, in float64. At the end one rank ends in the middle of a step,
and the others must notice. Started alone, it launches local ranks, and goes on in new ones after a
check that failed; under torchrun, mpirun or srun it is one of their ranks.

  gems doctor                        as many ranks as GPUs, or two
  gems doctor --ranks 4 GEMS-MASTER  one check on four ranks
  torchrun --nnodes 2 ... -m gems doctor
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from gems.cli.options import DEVICE, add_options, choice, count, path, real
from gems.cli.ranks import end_with_launcher, start
from gems.draw.table import table
from gems.draw.units import seconds
from gems.errors import GemsError, short
from gems.files import parse_json, read_text, write

if TYPE_CHECKING:
    from gems.torch.doctor import Check

OPTIONS = {
    "--ranks": count(0, "local ranks (default: as many as GPUs, or two)"),
    "--device": DEVICE,
    "--backend": choice(("gloo", "nccl"), None, "default: nccl on GPUs, gloo on CPUs"),
    "--out": path("the report (default gems-doctor.json)", "FILE", Path("gems-doctor.json")),
    "--patience": real(
        120.0, "until a check is taken as hung; its stacks are in the report (default 120)",
        "SECONDS",
    ),
}  # fmt: skip


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="find out whether it works on this machine",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checks", nargs="*", metavar="CHECK", help="some of them (default: all)")
    add_options(parser, OPTIONS)
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    end_with_launcher()
    from gems.distributed.launchers import place
    from gems.torch.doctor import environment, names, report

    here = place()
    world = here.world if here else given.ranks or _ranks()
    if given.ranks and given.ranks != world:
        raise GemsError(f"--ranks {given.ranks}, but {world} ranks were started; leave it out")
    known = names(world)
    if unknown := [name for name in given.checks if name not in known]:
        raise GemsError(f"no check is called {unknown[0]!r} on {world} ranks: {', '.join(known)}")
    wanted = given.checks or known
    if here is not None:
        return _in_rank(given, here.rank, world, wanted)
    surroundings = environment()
    print(table(_shown(surroundings), ("", "this machine")))
    found = list(_on_ranks(given, world, wanted))
    write(given.out, report(surroundings, world, found))
    failed = sum(not check.passed for check in found)
    print(f"{len(found) - failed} of {len(found)} checks passed; the report is {given.out}")
    return 1 if failed else 0


def _ranks() -> int:
    import torch

    return max(2, torch.cuda.device_count())


def _in_rank(given: argparse.Namespace, rank: int, world: int, wanted: list[str]) -> int:
    """Run checks one after the other; one that raises, or takes too long, ends this rank."""
    from gems.torch import doctor

    surroundings = doctor.environment() if rank == 0 else {}
    found: list[Check] = []
    for name in wanted:
        faulthandler.dump_traceback_later(given.patience, exit=True)
        check = doctor.run(world, name, device=given.device, backend=given.backend)
        faulthandler.cancel_dump_traceback_later()
        found.append(check)
        if rank == 0:
            print(_line(check), flush=True)
            write(given.out, doctor.report(surroundings, world, found))
    return 0 if all(check.passed for check in found) else 1


def _on_ranks(given: argparse.Namespace, world: int, wanted: list[str]) -> Iterator[Check]:
    """Checks on new ranks; after one that ended its ranks, the rest on others."""
    from gems.torch.doctor import Check

    left = list(wanted)
    while left:
        with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "stderr", "w+") as log:
            part, begin = Path(folder) / "part.json", perf_counter()
            code = start(_command(given, left, part), world, log)
            log.seek(0)
            done = parse_json(read_text(part))["checks"] if part.exists() else []
            yield from (Check(**check) for check in done)
            left = left[len(done) :]
            if left:  # the first of them ended its ranks
                took = perf_counter() - begin
                print(_line(check := _ended(left.pop(0), world, code, took, log.read())))
                yield check


def _command(given: argparse.Namespace, left: list[str], part: Path) -> list[str]:
    found = [sys.executable, "-m", "gems", "doctor", *left, "--out", str(part)]
    found += ["--patience", str(given.patience), "--device", given.device]
    return found + (["--backend", given.backend] if given.backend else [])


def _ended(name: str, world: int, code: int, took: float, log: str) -> Check:
    from gems.torch.doctor import ENDED, LOST_RANK, Check

    named = log.count(f"rank {world - 1} (process") == world - 1  # by each of the others
    if name == LOST_RANK and code == ENDED and named:
        return Check(name, True, f"all ranks ended, {seconds(took)} after they were started")
    return Check(name, False, f"exit code {code}; its ranks wrote:\n{short(log, 6000)}")


def _line(check: Check) -> str:
    seen = check.seen.replace("\n", "\n" + " " * 8)
    return f"{'ok' if check.passed else 'FAILED':6}  {check.name}: {seen}"


def _shown(surroundings: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in surroundings.items():
        if name == "devices":
            yield name, "; ".join(value) or "no GPU"
        elif isinstance(value, (str, int)) and "\n" not in str(value):
            yield name, str(value)
