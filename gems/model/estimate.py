"""What blocks cost on a machine, from the graph alone: a roofline, nothing is run.

Time follows the slower of arithmetic and memory traffic, plus a launch. An input gradient does the
arithmetic of its forward, and reads what was kept besides; so does a weight gradient, where there
are weights that are multiplied with.
"""

from __future__ import annotations

from gems.hardware import Device, Machine
from gems.model.costs import Cost, Costs
from gems.model.graph import Block, Graph


def estimate(graph: Graph, machine: Machine, precision: str = "fp32") -> Costs:
    """Seconds and bytes of every block, in order. `precision` is what products are computed in; the
    bytes are the graph's, which is recorded under autocast where that is."""
    device = machine.device
    return Costs(
        tuple(_cost(graph, i, block, device, precision) for i, block in enumerate(graph.blocks))
    )


def _cost(graph: Graph, index: int, block: Block, device: Device, precision: str) -> Cost:
    def seconds(flops: float, moved: float) -> float:
        arithmetic = flops / (device.compute_efficiency * device.flops_in(precision))
        traffic = moved / (device.memory_efficiency * device.bandwidth)
        return max(arithmetic, traffic) + device.launch

    back = any(graph.value[name].grad for name in block.writes)
    through = back and any(graph.value[name].grad for name in block.reads)
    learns = back and bool(block.parameters and block.flops)
    activations, weights = graph.activations([index]), graph.held([index])
    return Cost(
        f=seconds(block.flops, block.moved),
        i=seconds(block.flops, block.moved + activations) if through else 0.0,
        w=seconds(block.flops, block.moved) if learns else 0.0,
        activations=activations,
        weights=weights,
        gradients=graph.trained([index]),
        workspace=_workspace(graph, block),
        launch=device.launch,
    )


def _workspace(graph: Graph, block: Block) -> int:
    """Bytes of what a block reads and writes, or of their gradients, while it runs."""
    return sum(graph.value[name].bytes for name in (*block.reads, *block.writes))
