"""`gems machine`: show a machine, or measure this computer and keep it as `local`."""

from __future__ import annotations

import argparse
from typing import Any

from gems.cli.options import add_options, machine_of, machine_option, path
from gems.draw.table import table
from gems.draw.units import seconds, size
from gems.files import to_json, write
from gems.hardware import LOCAL, Link, Machine

OPTIONS = {
    "--machine": machine_option("which to show (default: measure this computer)", None),
    "--out": path("write it as JSON"),
}


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "machine",
        help="show a machine, or measure this one",
        description=f"{__doc__} A machine is a file of plain numbers that every prediction starts "
        "from: copy one, edit it, and give its path to --machine.",
    )
    add_options(parser, OPTIONS)
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    if given.machine is None:
        from gems.torch.measure_machine import measured

        found = measured()
        print(f"wrote {write(LOCAL, to_json(found))}; --machine local means it from now on")
    else:
        found = machine_of(given.machine)
    print(_shown(found))
    if given.out:
        print(f"wrote {write(given.out, to_json(found))}")
    return 0


def _shown(found: Machine) -> str:
    d = found.device
    rows = [
        ("device", d.name),
        ("arithmetic", f"{d.flops / 1e12:.3g} TFLOP/s, {d.compute_efficiency:.0%} reached"),
        ("memory", f"{size(d.memory)}, {d.bandwidth / 1e9:.3g} GB/s, {d.memory_efficiency:.0%}"),
        *(
            (f"in {name}", f"{d.flops_in(name) / 1e12:.3g} TFLOP/s")
            for name in ("fp16", "bf16")
            if d.flops_in(name) != d.flops
        ),
        *([("context", size(d.context))] if d.context else []),
        *([("communicator", f"{size(d.communicator)} each")] if d.communicator else []),
        ("launch", seconds(d.launch)),
        ("call", seconds(d.call)),
        ("link", _link(found.link)),
    ]
    if found.node is not None:
        rows.append(("node", f"{found.node} devices"))
    if found.between is not None:
        rows.append(("between nodes", _link(found.between)))
    return table(rows, ("", found.name))


def _link(link: Link) -> str:
    return f"{link.bandwidth / 1e9:.3g} GB/s after {seconds(link.latency)}"
