"""Made-up cost tables for planner tests: random small ones, and regular large ones."""

from __future__ import annotations

import random
from dataclasses import replace

from adjcomp.ir.costs import Gradient, JoinCost, StackCosts, Tie, TileCost
from adjcomp.ir.modes import bottom_layer
from adjcomp.ir.residency import Item, Residency
from adjcomp.machine import GIB, Machine, parse_machine


def regular_tile(name: str, tokens: int, *, width: int = 64, state: int = 1000, keep: int = 12) -> TileCost:
    """A residual layer of `width` channels whose VJP keeps `keep` * width numbers of 4 bytes a token."""
    stream = 4 * width * tokens
    return TileCost(
        name=name,
        stream_bytes=stream,
        carry_bytes=4 * state,
        keep_bytes=keep * stream,
        cotangent_bytes=stream,
        adjoint_bytes=4 * state,
        forward_workspace_bytes=4 * stream + 4 * state,
        keep_workspace_bytes=(keep + 3) * stream + 4 * state,
        adjoint_workspace_bytes=5 * stream + 8 * state,
        forward_seconds=2e-6 * tokens + 1e-4,
        keep_seconds=2.1e-6 * tokens + 1e-4,
        adjoint_seconds=4e-6 * tokens + 2e-4,
        forward_flops=1000 * tokens,
        adjoint_flops=2000 * tokens,
        reads_input=True,
        reads_output=False,
        reads_carry=True,
        has_vjp=True,
        passes_cotangent=True,
    )


def regular_stack(seq_len: int, chunk: int, layers: int, *, width: int = 64, state: int = 1000, keep: int = 12) -> StackCosts:
    """A stem, `layers` equal layers and a head."""
    count = -(-seq_len // chunk)

    def table(tokens: int) -> tuple[TileCost, ...]:
        middle = [regular_tile(f"layers.{k}", tokens, width=width, state=state, keep=keep) for k in range(layers)]
        stem = replace(
            middle[0],
            name="stem",
            carry_bytes=0,
            adjoint_bytes=0,
            keep_bytes=0,
            reads_input=False,
            reads_carry=False,
            passes_cotangent=False,
            forward_seconds=1e-7 * tokens,
            keep_seconds=1e-7 * tokens,
            adjoint_seconds=1e-7 * tokens,
        )
        head = replace(
            middle[0],
            name="head",
            stream_bytes=0,
            carry_bytes=0,
            adjoint_bytes=0,
            cotangent_bytes=0,
            reads_carry=False,
            keep_bytes=4 * 3 * tokens,
        )
        return (stem, *middle, head)

    parameters = 4 * 30 * width * width * layers
    return StackCosts(
        seq_len=seq_len,
        chunk=chunk,
        chunk_count=count,
        layers=table(chunk),
        last_layers=table(seq_len - (count - 1) * chunk),
        resident_bytes={"parameters": parameters, "inputs": 16 * seq_len},
        turn_bytes={"gradients": parameters},
        publish_bytes=(0,) * (layers + 2),
    )


def random_stack(seed: int, *, layers: int, chunks: int) -> StackCosts:
    """A stack of arbitrary small costs and flags; the last chunk differs from the others where `seed` says so."""
    rng = random.Random(seed)
    bottom = rng.choice([0, 0, 0, rng.randint(0, layers + 1)])
    flags = [(rng.random() < 0.7, rng.random() < 0.3, rng.random() < 0.7, rng.random() < 0.8) for _ in range(layers + 2)]

    def tile(k: int, scale: float) -> TileCost:
        reads_input, reads_output, reads_carry, carries = flags[k]
        head, vjp = k == layers + 1, k >= bottom

        def size(most: int) -> int:
            return max(1, round(rng.randint(1, most) * scale))

        stream, carry, kept = 0 if head else size(9), size(6) if carries else 0, size(25)
        forward = rng.randint(1, 20) * scale / 16
        return TileCost(
            name=f"layer{k}",
            stream_bytes=stream,
            carry_bytes=carry,
            keep_bytes=kept,
            cotangent_bytes=0 if head else size(9),
            adjoint_bytes=size(5) if carries else 0,
            forward_workspace_bytes=stream + carry + rng.randint(0, 9),
            keep_workspace_bytes=stream + carry + kept + rng.randint(0, 9),
            adjoint_workspace_bytes=20 + rng.randint(0, 30),
            forward_seconds=forward,
            keep_seconds=forward + rng.randint(0, 4) / 16,
            adjoint_seconds=rng.randint(1, 40) / 16,
            forward_flops=1,
            adjoint_flops=2,
            reads_input=reads_input and k > 0,
            reads_output=reads_output and not head,
            reads_carry=reads_carry and carries,
            has_vjp=vjp,
            passes_cotangent=vjp and k > bottom,
        )

    normal = [tile(k, 1.0) for k in range(layers + 2)]
    last = normal
    chunk, seq_len = 4, 4 * chunks
    if rng.random() < 0.5:
        seq_len -= rng.randint(1, 3)
        shorter = [tile(k, 0.6) for k in range(layers + 2)]
        last = [
            replace(b, carry_bytes=a.carry_bytes, adjoint_bytes=a.adjoint_bytes) for a, b in zip(normal, shorter, strict=True)
        ]
        last = [
            replace(t, forward_workspace_bytes=t.forward_workspace_bytes + 9, keep_workspace_bytes=t.keep_workspace_bytes + 9)
            for t in last
        ]
    return StackCosts(
        seq_len=seq_len,
        chunk=chunk,
        chunk_count=chunks,
        layers=tuple(normal),
        last_layers=tuple(last),
        resident_bytes={"parameters": rng.randint(0, 40)},
        turn_bytes={"gradients": rng.randint(0, 40)},
        publish_bytes=tuple(rng.randint(0, 3) for _ in range(layers + 2)),
    )


def with_gradients(costs: StackCosts, seed: int, most: int = 30) -> StackCosts:
    """`costs` with arbitrary gradients by layer, some of them shared by several layers."""
    rng, bottom = random.Random(seed), bottom_layer(costs)
    layers = range(bottom, costs.head + 1)

    def gradient(*who: int) -> Gradient:
        published = rng.randint(0, most)
        return Gradient(who, rng.choice([published, 2 * published]), published)

    found = [gradient(k) for k in layers if rng.random() < 0.9]
    if len(layers) > 1 and rng.random() < 0.5:
        found.append(gradient(*sorted(rng.sample(layers, rng.randint(2, len(layers))))))
    turn = {**costs.turn_bytes, "gradients": sum(g.accumulator_bytes for g in found)}
    ties = tuple(Tie(g.layers, g.accumulator_bytes) for g in found if len(g.layers) > 1)
    return replace(costs, gradients=tuple(found), turn_bytes=turn, ties=ties)


def hybrid_stack() -> StackCosts:
    """64 layers that take unequal time, 1,024 chunks of 1,024 tokens."""
    costs = regular_stack(1 << 20, 1 << 10, 64)
    factors = [random.Random(k).uniform(0.5, 2) for k in range(66)]
    tables = [
        tuple(slower(tile, factor) for tile, factor in zip(table, factors, strict=True))
        for table in (costs.layers, costs.last_layers)
    ]
    return replace(costs, layers=tables[0], last_layers=tables[1])


def slower(tile: TileCost, factor: float) -> TileCost:
    """The tile with other times."""
    return replace(
        tile,
        forward_seconds=tile.forward_seconds * factor,
        keep_seconds=tile.keep_seconds * factor,
        adjoint_seconds=tile.adjoint_seconds * factor,
    )


def unequal_machine(count: int, seed: int) -> Machine:
    """CPUs of different speeds, in two nodes."""
    machine, rng = parse_machine(f"cpu:{count}"), random.Random(seed)
    devices = [replace(d, peak_flops=d.peak_flops * rng.uniform(0.5, 2), node=i % 2) for i, d in enumerate(machine.devices)]
    links = {0: machine.node_links[0], 1: machine.node_links[0]} if count > 1 else machine.node_links
    return replace(machine, devices=tuple(devices), node_links=links)


def eight_unequal_devices() -> Machine:
    """Three sizes of memory and eight speeds."""
    machine = replace(unequal_machine(8, 3), name="unequal")
    devices = tuple(replace(d, memory_bytes=GIB << (i % 3)) for i, d in enumerate(machine.devices))
    return replace(machine, devices=devices)


def layered_residency(costs: StackCosts) -> Residency:
    """The bytes beside the tiles of `costs`, spread evenly over its layers; inputs are everywhere."""
    size = costs.head + 1
    return Residency(
        tuple(
            (
                *(Item("inputs", kind, costs.resident_bytes[kind], False) for kind in costs.resident_bytes if kind == "inputs"),
                *(Item(f"{kind} {k}", kind, b // size, False) for kind, b in costs.resident_bytes.items() if kind != "inputs"),
                *(Item(f"{kind} {k}", kind, b // size, True) for kind, b in costs.turn_bytes.items()),
            )
            for k in range(size)
        )
    )


def regular_joins(costs: StackCosts) -> StackCosts:
    """`costs` with ranges that summaries join: a third of a forward each way, states that are halo in their last quarter."""

    def join(tile: TileCost) -> JoinCost:
        halo, linear = tile.carry_bytes // 4, tile.carry_bytes - tile.carry_bytes // 4
        workspace = tile.forward_workspace_bytes + 2 * linear
        share = tile.forward_seconds / 3 if tile.carry_bytes else 0.0
        few = 1e-5 if tile.carry_bytes else 0.0
        return JoinCost(
            steps=3,
            halo_bytes=halo,
            summary_bytes=halo + 2 * linear,
            halo_adjoint_bytes=halo if tile.has_vjp else 0,
            adjoint_summary_bytes=2 * linear if tile.has_vjp else 0,
            tail_workspace_bytes=4 * halo,
            summarize_workspace_bytes=workspace,
            adjoint_summarize_workspace_bytes=workspace,
            tail_vjp_workspace_bytes=8 * halo,
            tail_seconds=few,
            summarize_seconds=share,
            settle_seconds=few,
            adjoint_summarize_seconds=share,
            adjoint_settle_seconds=few,
            tail_vjp_seconds=few,
        )

    return replace(costs, joins=tuple(join(tile) for tile in costs.layers))


def random_joins(costs: StackCosts, seed: int) -> StackCosts:
    """`costs` with arbitrary ways to join ranges: layers of halos alone, of none, and of both."""
    rng = random.Random(seed)

    def join(tile: TileCost) -> JoinCost:
        halo = rng.choice([0, tile.carry_bytes, rng.randint(0, tile.carry_bytes)]) if tile.carry_bytes else 0
        linear = tile.carry_bytes - halo
        back = tile.has_vjp and tile.carry_bytes > 0
        halo_back = rng.randint(0, halo) if back else 0
        return JoinCost(
            steps=rng.randint(1, costs.chunk) if halo else 0,
            halo_bytes=halo,
            summary_bytes=halo + 2 * linear if linear else 0,
            halo_adjoint_bytes=halo_back,
            adjoint_summary_bytes=rng.randint(1, 9) if linear and back else 0,
            tail_workspace_bytes=halo + rng.randint(0, 9),
            summarize_workspace_bytes=halo + 2 * linear + rng.randint(0, 9),
            adjoint_summarize_workspace_bytes=9 + rng.randint(0, 9),
            tail_vjp_workspace_bytes=rng.randint(0, 9),
            tail_seconds=rng.randint(1, 4) / 64 if halo else 0.0,
            summarize_seconds=rng.randint(1, 8) / 16 if linear else 0.0,
            settle_seconds=rng.randint(0, 2) / 64 if linear else 0.0,
            adjoint_summarize_seconds=rng.randint(1, 8) / 16 if linear and back else 0.0,
            adjoint_settle_seconds=rng.randint(0, 2) / 64 if linear and back else 0.0,
            tail_vjp_seconds=rng.randint(1, 4) / 64 if halo_back else 0.0,
        )

    return replace(costs, joins=tuple(join(tile) for tile in costs.layers))
