"""The example of training on ranks, in which rank 1 is killed after a step, once: run by torchrun.

dies_once.py MARKER STEP, then the arguments of the example; MARKER is a file that says that it has happened.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "examples"))


def main() -> None:
    """Train, and die on the way."""
    import train_on_ranks

    marker, last = Path(sys.argv[1]), int(sys.argv[2])
    save = train_on_ranks.save

    def save_and_die(folder: Path, step: int, compiled: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        save(folder, step, compiled, optimizer)
        if step == last and dist.get_rank() == 1 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    train_on_ranks.save = save_and_die
    train_on_ranks.main(sys.argv[3:])


if __name__ == "__main__":
    main()
