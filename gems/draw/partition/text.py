"""The partition of a model in characters: one line per stage, skips as rails on the left.

●─╮  stage 0  enc1 .. enc2  12 blocks  1.2 ms  keeps 12.0 MiB  weights 9.1 KiB
│ │           2.0 MiB to stage 1, 256.0 KiB to stage 2
● │  stage 1  enc3 .. dec1  20 blocks  1.3 ms  keeps 10.0 MiB  weights 4.0 MiB
│ │           2.0 MiB to stage 2
●─╯  stage 2  dec2 .. head  9 blocks   1.2 ms  keeps 14.0 MiB  weights 9.9 KiB
"""

from __future__ import annotations

from gems.draw.partition.cells import Partition, stays_put
from gems.draw.units import listed, size
from gems.plans.plan import Plan


def text(partition: Partition, plan: Plan | None = None) -> str:
    """The picture; the plan adds the ranks of each stage, and which values stay on theirs."""
    depth = len(partition.stages)
    sent = [dict(partition.sent(stage)) for stage in range(depth)]
    rails = _rails([(a, b) for a in range(depth) for b in sent[a] if b > a + 1])
    described = [_described(partition, stage, plan) for stage in range(depth)]
    widths = [max(map(len, column)) for column in zip(*described, strict=True)]
    lines = []
    for stage, parts in enumerate(described):
        row = "  ".join(part.ljust(width) for part, width in zip(parts, widths, strict=True))
        lines.append(f"{_node(stage, rails)}  {row}")
        if stage + 1 < depth:
            sizes = ", ".join(_sent(stage, b, n, plan) for b, n in sent[stage].items())
            wires = _wires(stage, stage + 1 in sent[stage], rails)
            lines.append(f"{wires}  {' ' * widths[0]}  {sizes}")
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _sent(source: int, target: int, count: int, plan: Plan | None) -> str:
    stays = plan is not None and stays_put(plan, source, target)
    return f"{size(count)} to stage {target}{' (same rank)' if stays else ''}"


def _described(partition: Partition, stage: int, plan: Plan | None) -> list[str]:
    cells = [partition.cells[n] for n in partition.of(stage)]
    names = dict.fromkeys((cells[0].name, cells[-1].name)) if cells else {}
    blocks = sum(len(cell.blocks) for cell in cells)
    parts = [f"stage {stage}"]
    parts += [listed("rank", plan.replica_groups[stage])] if plan else []
    parts += [" .. ".join(names), f"{blocks} blocks" if blocks != 1 else "1 block"]
    parts += [partition.spent(stage)] if partition.timed else []
    return [*parts, partition.kept(stage), f"weights {size(partition.stages[stage].weights)}"]


def _rails(skips: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Skips laid on as few rails as they need; those of one rail do not touch."""
    rails: list[list[tuple[int, int]]] = []
    for skip in sorted(skips, key=lambda skip: (skip[1] - skip[0], skip)):
        free = (rail for rail in rails if all(skip[0] >= b or skip[1] <= a for a, b in rail))
        rail = next(free, None)
        if rail is None:
            rails.append([skip])
        else:
            rail.append(skip)
    return rails


def _node(stage: int, rails: list[list[tuple[int, int]]]) -> str:
    """The stage itself, joined to every rail on which a skip of its begins or ends."""
    begins = [any(a == stage for a, _ in rail) for rail in rails]
    ends = [any(b == stage for _, b in rail) for rail in rails]
    passes = [any(a < stage < b for a, b in rail) for rail in rails]
    joined = [x or y for x, y in zip(begins, ends, strict=True)]
    furthest = max((n for n, touch in enumerate(joined) if touch), default=-1)
    drawn = "●"
    for n in range(len(rails)):
        inner = n < furthest
        drawn += "─" if n <= furthest else " "
        if passes[n]:
            drawn += "┼" if inner else "│"
        elif joined[n]:
            shape = (begins[n], ends[n], inner)
            drawn += SHAPES[shape]
        else:
            drawn += "─" if inner else " "
    return drawn


# Whether a skip begins here, one ends here, and a line runs on to a rail further out.
SHAPES = {
    (True, False, False): "╮",
    (False, True, False): "╯",
    (True, True, False): "┤",
    (True, False, True): "┬",
    (False, True, True): "┴",
    (True, True, True): "┼",
}


def _wires(stage: int, onward: bool, rails: list[list[tuple[int, int]]]) -> str:
    """What runs on below a stage."""
    kept = ["│" if any(a <= stage < b for a, b in rail) else " " for rail in rails]
    return " ".join(("│" if onward else " ", *kept))
