"""What blocks cost on a machine, from the graph alone: a roofline, nothing is run.

Time follows the slower of arithmetic and memory traffic, plus a launch. An input gradient does
about the work of its forward; so does a weight gradient where there are weights.
"""

from __future__ import annotations

from gems.costs import Cost, Costs
from gems.graph import Block, Graph
from gems.machine import Device, Machine


def estimate(graph: Graph, machine: Machine) -> Costs:
    """Seconds and bytes of every block, in order."""
    return Costs(
        tuple(_cost(graph, i, block, machine.device) for i, block in enumerate(graph.blocks))
    )


def _cost(graph: Graph, index: int, block: Block, device: Device) -> Cost:
    arithmetic = block.flops / (device.compute_efficiency * device.flops)
    traffic = block.moved / (device.memory_efficiency * device.bandwidth)
    f = max(arithmetic, traffic) + device.launch
    back = any(graph.value[name].grad for name in block.writes)
    return Cost(
        f=f,
        i=f if back else 0.0,
        w=f if back and block.parameters and block.flops else 0.0,
        stash=graph.stash([index]),
        weights=graph.held([index]),
    )
