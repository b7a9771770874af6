"""Figure 1 and the claims about context: bytes of a training step against its length, planned, measured or by arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import MambaConfig, MambaForCausalLM

import adjcomp
from adjcomp.machine import parse_machine
from adjcomp.passes.lowering import kernels_as_ops

BATCH = 2
STATES = 16
VOCABULARY = 50_280
CONTEXTS = (10, 100, 1_000, 10_000, 100_000, 1_000_000)
MACHINE = "mi300x"  # the profile with most memory; a plan's bytes don't depend on the machine
BACKPROP_BYTES = 37_500 / 2048  # per token, layer and d_model: what backprop over fused kernels keeps in 16 bits
ONE, NODES = "a100-40gb", "a100-40gb:5x8"  # one GPU, and the paper's five nodes of eight
LONG = (1 << 20, 1 << 24)
QUICK = adjcomp.Options(deterministic=True, solver_time_limit_seconds=0.0)


@dataclass(frozen=True)
class Size:
    """One of the paper's sizes, by a Mamba of about as many parameters (the paper gives no dimensions)."""

    name: str
    width: int
    layers: int

    def model(self, device: str, dtype: torch.dtype) -> MambaForCausalLM:
        """The model, without weights on the meta device."""
        config = MambaConfig(
            vocab_size=VOCABULARY, hidden_size=self.width, num_hidden_layers=self.layers, state_size=STATES, use_cache=False
        )
        torch.manual_seed(0)
        with torch.device(device):
            return MambaForCausalLM(config).to(dtype).train()


SIZES = (Size("32M", 384, 12), Size("63M", 512, 22), Size("127M", 768, 24), Size("225M", 1024, 26), Size("1.27B", 2048, 44))


def figure_1() -> dict[str, list[dict[str, Any]]]:
    """rows: bytes by way of training, one row a size and context. plans: of long contexts of the largest size."""
    rows, plans = [], []
    for size in SIZES:
        model = size.model("meta", torch.bfloat16)
        count = sum(p.numel() for p in model.parameters())
        states = states_bytes(model)
        for context in CONTEXTS:
            row = {"size": size.name, "parameters": count, "context": context, "states": states}
            rows.append(row | by_arithmetic(size, context, states) | {"adjcomp": smallest_peak(model, context)})
            print(rows[-1], flush=True)
        if size is SIZES[-1]:
            plans = [planned(model, machine, context) for machine in (ONE, NODES) for context in LONG]
    return {"rows": rows, "plans": plans}


def planned(model: MambaForCausalLM, machine: str, context: int) -> dict[str, Any]:
    """What the fastest plan found for a context takes on a machine, using all of its memory."""
    plan = adjcomp.plan(model, batch_size=BATCH, seq_len=context, machine=machine, optimizer="adam", options=QUICK)
    plan.verify()
    found = {"seconds": plan.seconds, "gap": plan.gap, "peak": max(plan.peak_bytes.values())}
    row = {"machine": machine, "context": context} | found
    print(row, flush=True)
    return row


def smallest_peak(model: MambaForCausalLM, context: int) -> int:
    """Peak of the smallest plan."""
    try:
        adjcomp.plan(model, 1, batch_size=BATCH, seq_len=context, machine=MACHINE, optimizer="adam", options=QUICK)
    except adjcomp.BudgetError as error:
        return error.minimum_bytes
    raise AssertionError("one byte was enough")


def states_bytes(model: MambaForCausalLM) -> int:
    """Parameters, their gradients as they are accumulated, and Adam's state."""
    plan = adjcomp.plan(model, batch_size=BATCH, seq_len=16, machine=MACHINE, optimizer="adam", options=QUICK)
    return sum(share for kind, share in plan.bytes_by_kind.items() if kind in ("parameters", "gradients", "optimizer"))


def by_arithmetic(size: Size, context: int, states: int) -> dict[str, int]:
    """Bytes of the other ways, the model's own included: 16-bit activations, the loss computed by chunks in all of them."""
    tokens, inner = BATCH * context, 2 * size.width
    per_layer = BACKPROP_BYTES * size.width
    stored = 2 * (inner * STATES + STATES + inner + size.width)  # h, C, the step sizes that make A, and ŷ
    return {
        "backprop": states + round(tokens * size.layers * per_layer),
        "checkpointing": states + round(tokens * (size.layers * 2 * size.width + per_layer)),
        "paper": states + tokens * (size.layers * stored + 2 * size.width),
    }


ROOM = 100_000_000  # bytes over the smallest plan's, which runs a few tokens at a time
MEASURED = (*((SIZES[0], context) for context in (10, 100, 1_000)), *((size, 1_000) for size in SIZES[1:-1]))


def measured() -> list[dict[str, Any]]:
    """float32 on this computer: peaks of planned steps, and what plain autograd over the same ops saves for its backward.

    The budget of a step is the smallest plan's peak and some room.
    """
    rows = []
    for size, context in MEASURED:
        model = size.model("cpu", torch.float32)
        ids = torch.randint(0, VOCABULARY, (BATCH, context))
        compiled = adjcomp.compile(model, "1KiB", optimizer="adam", options=QUICK)
        try:
            compiled(input_ids=ids, labels=ids)
        except adjcomp.BudgetError as error:
            compiled = adjcomp.compile(model, error.minimum_bytes + ROOM, optimizer="adam", options=QUICK)
        compiled(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad(set_to_none=True)
        optimizer = compiled.plan.bytes_by_kind.get("optimizer", 0)
        stats = compiled.stats
        rows.append(
            {
                "size": size.name,
                "context": context,
                "chunk": compiled.plan.chunk,
                "planned": stats.predicted_peak_bytes,
                "optimizer": optimizer,
            }
            | {"measured": stats.measured_peak_bytes + optimizer, "plain": saved_bytes(model, ids)}
        )
        print(rows[-1], flush=True)
    return rows


def saved_bytes(model: MambaForCausalLM, ids: torch.Tensor) -> int:
    """Bytes of the storages that plain autograd keeps between forward and backward, parameters apart."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[int, int] = {}
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), kernels_as_ops():
        model(input_ids=ids, labels=ids)
    return sum(found.values())


def claims(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Longest contexts of the largest size on one A100 of 40 GB and on the paper's five nodes of eight, from rows of Figure 1.

    adjcomp: the longest context of the figure whose smallest plan fits on one device, and its peak; the others by arithmetic, the
    memory of all devices taken as one.
    """
    size, found = SIZES[-1], []
    mine = [row for row in rows if row["size"] == size.name]
    for name, machine in (("one GPU", ONE), ("five nodes of eight", NODES)):
        devices = parse_machine(machine).devices
        memory, states = sum(device.memory_bytes for device in devices), mine[0]["states"]
        each = by_arithmetic(size, 1_000_000, 0)
        row: dict[str, Any] = {"where": name}
        row |= {way: int(max(0, memory - states) * 1_000_000 / each[way]) for way in each}
        fitting = [r for r in mine if r["adjcomp"] <= devices[0].memory_bytes]
        best = max(fitting, key=lambda r: r["context"])
        found.append(row | {"adjcomp": best["context"], "peak": best["adjcomp"], "largest": best is mine[-1]})
    return found
