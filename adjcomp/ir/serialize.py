"""Plans as JSON: exact round trips, stable key order, nothing that depends on the clock or on hashing."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from adjcomp.ir.actions import Action, own_fields
from adjcomp.ir.costs import Gradient, JoinCost, StackCosts, Tie, TileCost
from adjcomp.ir.plan import Certificate, HostTier, Plan, Share, Status, Wiring
from adjcomp.ir.transfers import ACTIONS
from adjcomp.ir.values import Value, parse_value

FORMAT = "adjcomp plan"
VERSION = 1

_OWN_FIELDS: dict[str, tuple[str, ...]] = {name: own_fields(kind) for name, kind in ACTIONS.items()}


def plan_to_json(plan: Plan) -> str:
    """JSON text of `plan`: a header, then one action a line, so that texts of two plans can be compared line by line."""
    header = {
        "format": FORMAT,
        "version": VERSION,
        "shares": [asdict(share) for share in plan.shares],
        "wiring": asdict(plan.wiring) if plan.wiring is not None else None,
        "certificate": {**asdict(plan.certificate), "status": plan.certificate.status.value},
        "costs": asdict(plan.costs),
    }
    names: dict[Value, str] = {}
    lines = ",\n".join([_encode(action, names) for action in plan.actions])
    return f'{json.dumps(header)[:-1]}, "actions": [\n{lines}\n]}}\n'


def plan_from_json(text: str) -> Plan:
    """The plan of `text`.

    Raises:
        ValueError: `text` is no JSON, no plan, a plan of another version, or names an unknown action or value.
    """
    data = json.loads(text)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError("this is no saved plan: a plan's JSON is an object whose 'format' is 'adjcomp plan'")
    if data.get("version") != VERSION:
        raise ValueError(f"saved as version {data.get('version')}, but this adjcomp reads version {VERSION}: plan again")
    try:
        costs = _costs(data["costs"])
        certificate = data["certificate"]
        known: dict[str, Value] = {}
        return Plan(
            costs=costs,
            shares=tuple(_share(share) for share in data["shares"]),
            wiring=_wiring(data["wiring"]),
            certificate=Certificate(
                **{**certificate, "status": Status(certificate["status"]), "chunks": tuple(certificate["chunks"])}
            ),
            actions=tuple([_decode(entry, known) for entry in data["actions"]]),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"this saved plan is damaged: {error!r}") from error


def _encode(action: Action, names: dict[Value, str]) -> str:
    """One line of JSON; written by hand because the encoder's general path is several times slower on 200,000 actions."""
    name = type(action).__name__
    own = "".join(f', "{field}": {_literal(getattr(action, field))}' for field in _OWN_FIELDS[name])
    frees = []
    for value in action.frees:
        text = names.get(value)
        if text is None:
            text = names[value] = f'"{value}"'
        frees.append(text)
    return f'{{"action": "{name}"{own}, "device": {action.device}, "stream": {action.stream}, "frees": [{", ".join(frees)}]}}'


def _literal(item: Any) -> str:
    """An int, a bool or a value as JSON."""
    if item is True:
        return "true"
    if item is False:
        return "false"
    return str(item) if isinstance(item, int) else f'"{item}"'


def _decode(entry: dict[str, Any], known: dict[str, Value]) -> Action:
    """The action of one JSON entry; `known` shares equal values between actions."""
    arguments = dict(entry)
    name = arguments.pop("action")
    if name not in ACTIONS:
        raise ValueError(f"unknown action {name!r}: plans are made of {', '.join(ACTIONS)}")
    frees = []
    for text in arguments.pop("frees"):
        value = known.get(text)
        if value is None:
            value = known[text] = parse_value(text)
        frees.append(value)
    if "value" in arguments:
        arguments["value"] = parse_value(arguments["value"])
    return ACTIONS[name](frees=tuple(frees), **arguments)


def _share(data: dict[str, Any]) -> Share:
    """One device of a saved plan."""
    host = data.get("host")
    return Share(**{**data, "host": None if host is None else HostTier(**host)})


def _wiring(data: dict[str, Any] | None) -> Wiring | None:
    """The links of a saved plan; None for one device."""
    if data is None:
        return None
    return Wiring(tuple(data["nodes"]), tuple(tuple(link) for link in data["links"]), tuple(data["network"]))


def _costs(data: dict[str, Any]) -> StackCosts:
    """The cost tables of a saved plan."""
    tables = {key: tuple(TileCost(**row) for row in data[key]) for key in ("layers", "last_layers")}
    ties = tuple(Tie(tuple(tie["layers"]), tie["gradient_bytes"]) for tie in data["ties"])
    sides = tuple(tuple(layers) for layers in data["shared_sides"])
    joins = tuple(JoinCost(**row) for row in data.get("joins", ()))
    gradients = tuple(Gradient(**{**row, "layers": tuple(row["layers"])}) for row in data.get("gradients", ()))
    found = {**data, **tables, "publish_bytes": tuple(data["publish_bytes"]), "ties": ties, "shared_sides": sides, "joins": joins}
    return StackCosts(**{**found, "gradients": gradients})
