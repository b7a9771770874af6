"""Derivative formulas that write into their own temporaries, made functional: a tile's programs count every value once, where it
is made.
"""

from __future__ import annotations

from torch import fx

from adjcomp.errors import CaptureError
from adjcomp.passes.aliasing import is_alias, storage_root
from adjcomp.passes.writes import functional_form, mutates


def out_of_place(graph: fx.Graph) -> None:
    """`x.op_(…)` becomes `y = x.op(…)`, and what reads x afterwards reads y.

    Raises CaptureError where x is seen through views: no formula of torch does that today.
    """
    for node in list(graph.nodes):
        if mutates(node):
            _rewrite(graph, node)


def _rewrite(graph: fx.Graph, node: fx.Node) -> None:
    written = node.args[0]
    assert isinstance(written, fx.Node)
    shared = storage_root(written) is not written or any(is_alias(user) for user in written.users if user is not node)
    if shared or written.op == "placeholder":
        where = node.meta.get("where", "the backward pass")
        raise CaptureError(
            f"{where}: {node.target} writes into a value that others see, in a derivative; this cannot be captured"
        )
    with graph.inserting_before(node):
        made = graph.call_function(functional_form(node), node.args, node.kwargs)
    made.meta = dict(node.meta)
    order = {other: place for place, other in enumerate(graph.nodes)}
    for user in list(written.users):
        if order[user] > order[node]:
            user.replace_input_with(written, made)
    node.replace_all_uses_with(made)
    graph.erase_node(node)
