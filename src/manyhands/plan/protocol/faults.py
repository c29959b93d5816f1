"""What goes wrong in a simulated run: deaths, pauses and cut links, and whom they meet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from manyhands.core.host import Host
from manyhands.core.pushes import Pushes

if TYPE_CHECKING:
    from manyhands.core.messages import View
    from manyhands.plan.protocol.node import Node
    from manyhands.plan.protocol.scenario import Fault
    from manyhands.plan.protocol.world import World

__all__ = ["strike"]

NOTICE_S = 0.02


def strike(world: World, fault: Fault) -> None:
    """Let ``fault`` happen now. One that finds nobody to meet does not happen."""
    verb, _, rest = fault.kind.partition(" ")
    who, _, whom = rest.partition(" from ")
    view = world.rng.choice(world.coordinator.service.views)
    victims = _find(world, who, view)
    others = [node for node in _find(world, whom, view) if node not in victims]
    if world.trace is not None:
        names = " from ".join(", ".join(map(str, nodes)) for nodes in (victims, others) if nodes)
        world.trace.append(f"{'':9}    {verb}: {names or 'nobody'}")
    world.counts[fault.kind] += bool(victims and (others or not whom))
    until = world.now + fault.seconds
    for node in victims:
        if verb == "kill":
            _kill(world, node, fault)
        elif verb == "pause":
            node.paused_until = max(node.paused_until, until)
        for other in others:
            world.cuts[node.number, other.number] = until
            if verb != "mute":
                world.cuts[other.number, node.number] = until


def _find(world: World, who: str, view: View) -> list[Node]:
    """The living processes that a word of a fault means at this moment; ``view`` is that of some shard."""
    rng, alive = world.rng, [node for node in world.nodes.values() if node.alive]
    match who:
        case "primary":
            return [node for node in alive if node.number == view.primary]
        case "backup":
            return [node for node in alive if node.number == view.backup]
        case "pair":
            return [node for node in alive if node.number in (view.primary, view.backup)]
        case "server" | "worker":
            living = world.living(Host if who == "server" else Pushes)
            return [rng.choice(living)] if living else []
        case "coordinator":
            return [world.nodes[0]]
        case "process":
            return [rng.choice(alive)]
        case "half":
            return [node for node in alive if rng.random() < 0.5]
        case "all":
            return alive
    return []


def _kill(world: World, node: Node, fault: Fault) -> None:
    node.alive = False
    if fault.noticed:
        world.schedule(world.now + NOTICE_S * world.rng.random(), world.nodes[0], "died", node.number)
    # A successor comes as another process, with nothing in memory.
    world.schedule(world.now + fault.seconds, None, "server" if isinstance(node.machine, Host) else "worker")
