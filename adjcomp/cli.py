"""The `adjcomp` command. Only what a command needs is imported, when it runs: `adjcomp --help` must not wait for torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

DESCRIPTION = """\
Plan the training of state-space models on long sequences within a byte budget, and look at such plans.

MODEL is a published shape (such as mamba-1.4b; an unknown name lists them all), a Python function as module:function
that returns a model, or a folder with a transformers config.json. No weights are read: plans need shapes only."""

EXIT_CODES = """\
exit codes: 0 done; 1 the answer is no (no plan fits, gradients differ, plans differ); 2 something is wrong with the input.

  adjcomp plan mamba-1.4b --seq-len 1M --budget 38GiB --machine a100-40gb --html plan.html
  adjcomp frontier mamba-130m --seq-len 256K --machine a100-40gb --optimizer adamw
  adjcomp check mamba-130m --layers 2"""

_SCALES = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_count(text: str) -> int:
    """A number of tokens: "65536", "65_536", "64K" or "1M" (powers of 1024). ValueError for anything else."""
    scale = _SCALES.get(text[-1:].upper(), 1)
    digits = text[:-1] if scale > 1 else text
    if not digits.isascii() or not digits.replace("_", "").isdigit() or int(digits) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number such as 65536, 64K or 1M (powers of 1024)")
    return int(digits) * scale


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("adjcomp", description=DESCRIPTION, epilog=EXIT_CODES, formatter_class=raw)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    plan = commands.add_parser("plan", help="plan a training step and print the plan")
    _add_model(plan, seq_len=None)
    _add_machine(plan)
    plan.add_argument("--budget", help="bytes on every device, such as 38GiB (default: all that a device has)")
    plan.add_argument("--chunk", type=parse_count, help="chunk length in tokens (default: the planner chooses)")
    plan.add_argument("--html", metavar="FILE", help="write the plan as a page")
    plan.add_argument("--json", metavar="FILE", help="save the plan; adjcomp show and Plan.from_json read it")
    plan.add_argument("--perfetto", metavar="FILE", help="write the plan as a trace for ui.perfetto.dev")
    frontier = commands.add_parser("frontier", help="print what memory buys: peak against time, from the smallest budget up")
    _add_model(frontier, seq_len=None)
    _add_machine(frontier)
    frontier.add_argument("--points", type=parse_count, default=8, help="budgets to plan for (default: 8)")
    _add_gradient(plan)
    _add_gradient(frontier)
    explain = commands.add_parser("explain", help="print what was found in a model: layers, states, what tiles keep")
    _add_model(explain, seq_len="4K")
    check = commands.add_parser("check", help="compare a model's gradients with plain autograd's, on this computer's CPU")
    _add_model(check, seq_len="64")
    check.add_argument("--budget", help="bytes, such as 512MiB (default: what is free)")
    check.add_argument("--chunk", type=parse_count, default=16, help="chunk length in tokens (default: 16)")
    _add_gradient(check)
    check.add_argument("--bound", type=float, default=1e-5, help="largest relative error that passes (default: 1e-5)")
    show = commands.add_parser("show", help="print a saved plan")
    show.add_argument("plan", metavar="PLAN.json")
    show.add_argument("--html", metavar="FILE", help="write it as a page")
    show.add_argument("--perfetto", metavar="FILE", help="write it as a trace")
    diff = commands.add_parser("diff", help="print what differs between two saved plans")
    diff.add_argument("first", metavar="A.json")
    diff.add_argument("second", metavar="B.json")
    commands.add_parser("machines", help="list the machines that plans can be made for")
    return parser


def _add_model(parser: argparse.ArgumentParser, *, seq_len: str | None) -> None:
    parser.add_argument("model", metavar="MODEL", help="a published shape, module:function, or a folder with a config.json")
    tokens = "tokens, such as 65536 or 1M" + ("" if seq_len is None else f" (default: {seq_len})")
    parser.add_argument("--seq-len", type=parse_count, required=seq_len is None, default=seq_len, help=tokens)
    parser.add_argument("--batch-size", type=parse_count, default=1, help="sequences (default: 1)")
    dtypes = ("bfloat16", "float16", "float32")
    parser.add_argument("--dtype", choices=dtypes, help="of parameters (default: bfloat16; on a cpu float32)")
    parser.add_argument("--layers", type=parse_count, help="another number of layers than the shape's")


def _add_gradient(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--coupling", choices=("exact", "residual"), default="exact", help="residual: an approximate gradient")
    window = "truncate adjoints to this many tokens: an approximate gradient (default: exact)"
    parser.add_argument("--adjoint-window", type=parse_count, metavar="TOKENS", help=window)


def _add_machine(parser: argparse.ArgumentParser) -> None:
    machines = "such as a100-80gb or a100-40gb:8, or a YAML file (default: cpu; see adjcomp machines)"
    parser.add_argument("--machine", default="cpu", help=machines)
    host = "pinned host memory that borders may be spilled to on an accelerator, such as 64GiB (default: none)"
    parser.add_argument("--host-budget", metavar="BYTES", help=host)
    parser.add_argument("--optimizer", help="whose state is counted in the budget, such as adamw (default: none)")


def main(words: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Errors are one message on stderr."""
    arguments = build_parser().parse_args(words)
    from adjcomp import commands
    from adjcomp.errors import BudgetError

    try:
        text, code = commands.COMMANDS[arguments.command](arguments)
    except BudgetError as error:
        print(f"adjcomp: {error}", file=sys.stderr)
        return 1
    except (ValueError, TypeError, ImportError, OSError) as error:
        print(f"adjcomp: {error}", file=sys.stderr)
        return 2
    try:
        print(text, flush=True)
    except BrokenPipeError:  # the reader, such as head, has had enough
        sys.stderr.close()
    return code


if __name__ == "__main__":
    sys.exit(main())
