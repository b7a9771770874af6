"""The way to other ranks: transfers between two, sums over several, on torch.distributed's process groups.

On a CPU (Gloo) every transfer is waited for by a thread. On an accelerator (NCCL) transfers are ordered with the computation by
streams, the host runs ahead, and every ordered pair of ranks has a communicator of its own: sends and receives of one
communicator run one after the other, and those of both directions would wait for each other. So there is a group for transfers
up the plan's devices and one for those down; in each NCCL makes a communicator for a pair when that first meets.

torch names a group by its ranks and the number of groups that a rank has. So all ranks make equally many, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from adjcomp.runtime.mesh.waiting import Ticket, Waiter, broken, done_ticket, wait_for
from adjcomp.runtime.mesh.watch import EVERYONE, Watch

Tensor = torch.Tensor
Group = Any  # dist.ProcessGroup, which torch leaves without a type


@dataclass
class Traffic:
    """Bytes that this rank has handed to others in a step."""

    sent: int = 0  # values of the plan, handed to another rank
    summed: int = 0  # gradients given to the plan's sums over ranks


@dataclass(frozen=True)
class Circle:
    """Ranks that meet: a process group for tensors and one on the host for control.

    ranks: global ones, in the plan's order, which need not be that of the groups.
    """

    name: str
    ranks: tuple[int, ...]
    tensors: Group
    control: Group


@dataclass
class Link:
    """One rank's way to the others of a plan."""

    circle: Circle  # the ranks of the plan; device d of the plan is circle.ranks[d]
    replicas: Circle | None  # ranks with the same part of the same plan on other data
    ways: tuple[Group, Group]  # for transfers to later devices of the plan, and to earlier ones
    watch: Watch
    device: torch.device
    traffic: Traffic = field(default_factory=Traffic)
    _waiters: dict[str, Waiter] = field(default_factory=dict)
    _groups: dict[tuple[int, ...], Group] = field(default_factory=dict)  # by devices that add up together

    @property
    def place(self) -> int:
        """This rank's device in the plan."""
        return self.circle.ranks.index(self.watch.own)

    def send(self, parts: Sequence[Tensor], target: int, tag: int, what: str) -> Ticket:
        """Begin to send dense tensors to device `target` of the plan."""
        rank = self.circle.ranks[target]
        group = self._pair(self.place, target)
        self.traffic.sent += sum(part.numel() * part.element_size() for part in parts)

        def start() -> list[Any]:
            return [dist.isend(part, rank, group=group, tag=tag) for part in parts]

        return self._ticket(f"to {rank}", start, Ticket(str(rank), (rank,), f"{what} to rank {rank}"))

    def receive(self, parts: Sequence[Tensor], source: int, tag: int, what: str) -> Ticket:
        """Begin to receive into dense tensors from device `source` of the plan."""
        rank = self.circle.ranks[source]
        group = self._pair(source, self.place)

        def start() -> list[Any]:
            return [dist.irecv(part, rank, group=group, tag=tag) for part in parts]

        return self._ticket(f"from {rank}", start, Ticket(str(rank), (rank,), f"{what} from rank {rank}"))

    def wait(self, ticket: Ticket) -> None:
        """Wait for a transfer or a sum. RankError when it can't come any more."""
        wait_for(ticket, self.watch)

    def prepare(self, holders: Sequence[tuple[int, ...]]) -> None:
        """Make the groups of devices that add up together in a plan; all ranks of the plan call this with the same sets.

        A rank makes one of itself in place of each that it is no part of.
        """
        for devices in holders:
            ranks = sorted(self.circle.ranks[device] for device in devices)
            if devices in self._groups or not 1 < len(ranks) < len(self.circle.ranks):
                continue
            own = ranks if self.watch.own in ranks else [self.watch.own]
            self._groups[devices] = dist.new_group(own, use_local_synchronization=True)

    def total(self, parts: Sequence[Tensor], holders: tuple[int, ...], what: str) -> Ticket:
        """Begin to add tensors up, in place, over some devices of the plan, which all call this."""
        ranks = tuple(self.circle.ranks[device] for device in holders)
        if len(ranks) == 1:
            return done_ticket(what)
        everyone = ranks == self.circle.ranks
        group = self.circle.tensors if everyone else self._groups[holders]
        name = self.circle.name if everyone else f"{self.circle.name} {ranks}"
        return self._meet(name, ranks, what, lambda: [self._sum(part, group) for part in parts])

    def average(self, parts: Sequence[Tensor]) -> Ticket | None:
        """Begin to replace tensors by their mean over the replicas; None where there is one replica. Divides at once."""
        if self.replicas is None:
            return None
        circle = self.replicas
        for part in parts:
            part.div_(len(circle.ranks))
        return self._meet(
            circle.name, circle.ranks, "the gradients of other replicas", lambda: [self._sum(p, circle.tensors) for p in parts]
        )

    def scattered(self, pairs: Sequence[tuple[Tensor, Tensor]], circle: Circle, what: str) -> Ticket:
        """Begin to fill the first tensor of each pair with this rank's rows of the second, added up over a circle's ranks."""
        count = len(circle.ranks)

        def start() -> list[Any]:
            return [dist.reduce_scatter(to, list(own.chunk(count)), group=circle.tensors, async_op=True) for to, own in pairs]

        return self._meet(circle.name, circle.ranks, what, start)

    def gather(self, pairs: Sequence[tuple[Tensor, Tensor]], circle: Circle, what: str, *, ahead: bool = False) -> Ticket:
        """Begin to fill the first tensor of each pair with the second ones of all ranks of a circle, along dimension 0.

        ahead: this rank has other work until it waits for the ticket.
        """
        count = len(circle.ranks)

        def start() -> list[Any]:
            return [dist.all_gather(list(to.chunk(count)), own, group=circle.tensors, async_op=True) for to, own in pairs]

        return self._meet(circle.name, circle.ranks, what, start, ahead=ahead)

    def agree(self, own: Tensor, circle: Circle, what: str) -> list[Tensor]:
        """The small tensors of all ranks of a circle, on the host."""
        if len(circle.ranks) == 1:
            return [own]
        found = {rank: torch.empty_like(own) for rank in dist.get_process_group_ranks(circle.control)}

        def start() -> list[Any]:
            return [dist.all_gather([*found.values()], own, group=circle.control, async_op=True)]

        self.wait(self._meet(f"{circle.name} control", circle.ranks, what, start, on_host=True))
        return [found[rank] for rank in circle.ranks]

    def spread(self, payload: bytes, circle: Circle, what: str) -> bytes:
        """The bytes of the first rank of a circle, on all of them."""
        size = int(self.agree(torch.tensor([len(payload)], dtype=torch.int64), circle, what)[0])
        data = torch.zeros(size, dtype=torch.uint8)
        if self.watch.own == circle.ranks[0]:
            data = torch.frombuffer(bytearray(payload), dtype=torch.uint8)

        def start() -> list[Any]:
            return [dist.broadcast(data, circle.ranks[0], group=circle.control, async_op=True)]

        if len(circle.ranks) > 1:
            self.wait(self._meet(f"{circle.name} control", circle.ranks, what, start, on_host=True))
        return bytes(data.numpy())

    def close(self) -> None:
        """End the threads."""
        for waiter in self._waiters.values():
            waiter.close()
        self._waiters.clear()

    def _sum(self, part: Tensor, group: Group) -> Any:
        return dist.all_reduce(part, group=group, async_op=True)

    def _meet(
        self,
        name: str,
        ranks: Sequence[int],
        what: str,
        start: Callable[[], list[Any]],
        *,
        on_host: bool = False,
        ahead: bool = False,
    ) -> Ticket:
        self.watch.come(name)
        return self._ticket(name, start, Ticket(f"{EVERYONE}{name}", tuple(ranks), what), on_host=on_host, ahead=ahead)

    def _ticket(
        self, way: str, start: Callable[[], list[Any]], ticket: Ticket, *, on_host: bool = False, ahead: bool = False
    ) -> Ticket:
        """Start a transfer and see that somebody waits for it. RankError where the other side is gone already."""
        try:
            works = start()
        except RuntimeError as error:
            raise broken(ticket, self.watch, error) from error
        if self.device.type == "cpu" or on_host:
            if way not in self._waiters:
                self._waiters[way] = Waiter(f"adjcomp-{way}")
            self._waiters[way].add(works, ticket)
            return ticket
        ticket.works.extend(works)
        while ticket.works and not ahead:
            ticket.works.pop(0).wait()  # orders the current stream after the transfer; the host goes on
        ticket.done.set()
        return ticket

    def _pair(self, source: int, target: int) -> Group:
        """The group for transfers from one device to another."""
        return self.ways[source > target]
