"""`gems trace`: the blocks of a model, with what each reads, writes, keeps and computes."""

from __future__ import annotations

import argparse
from typing import Any

from gems.cli.model_options import MODEL, studied
from gems.cli.options import add_options, path
from gems.draw.table import table
from gems.draw.units import size
from gems.files import to_json, write
from gems.hardware import machine


def add(commands: Any) -> None:
    parser = commands.add_parser("trace", help="list the blocks of a model", description=__doc__)
    add_options(parser, MODEL, "model")
    add_options(parser, {"--out": path("write the graph as JSON")})
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    graph, _ = studied(given, machine("cpu")).graph
    number = {block: i for i, run in enumerate(graph.layers) for block in run}
    rows = [
        (
            number[i],
            block.name,
            " ".join("x".join(map(str, graph.value[n].shape)) for n in block.writes),
            f"{block.flops / 1e6:.1f}",
            size(graph.activations([i])),
            size(graph.held([i])),
        )
        for i, block in enumerate(graph.blocks)
    ]
    print(table(rows, ("layer", "block", "gives", "MFLOP", "keeps", "weights")))
    everything = range(len(graph.blocks))
    print(
        f"{len(graph.blocks)} blocks in {len(graph.layers)} layers; one micro-batch keeps "
        f"{size(graph.activations(everything))} for backward, weights take "
        f"{size(graph.held(everything))}"
    )
    if given.out:
        print(f"wrote {write(given.out, to_json(graph))}")
    return 0
