"""From YAML to plain tables that remember their lines, by the core schema of YAML 1.2.

``yes``, ``on``, ``12:30`` and dates are text; no tags, no duplicate keys, no documents that unfold to many times their size.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from orchestrator.plans.reading import Fault, Row, Table, Unreadable

UNFOLDED_PER_NODE = 10
"""How many times its own size a YAML document may have once its aliases are followed."""

_TAG = "tag:yaml.org,2002:"
_RESOLVERS = [
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("int", r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$", list("-+0123456789")),
    (
        "float",
        r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        list("-+.0123456789"),
    ),
    ("merge", r"^<<$", ["<"]),
]


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # the base is one of two classes
    """PyYAML's safe loader down to nodes, with the scalars of YAML 1.2; it constructs nothing."""

    yaml_implicit_resolvers: dict[str, Any] = {}


for _name, _pattern, _first in _RESOLVERS:
    _Loader.add_implicit_resolver(_TAG + _name, re.compile(_pattern), _first)

_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


def read_yaml(text: str, fault: Fault) -> Any:
    """Return the document as Tables, Rows and scalars; faults of single values go to *fault*."""
    if bad := _CONTROL.search(text):
        line = text.count("\n", 0, bad.start()) + 1
        raise Unreadable(line, f"the control character U+{ord(bad.group()):04X} is not allowed in YAML")
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        raise _yaml_fault(error, text) from error
    except yaml.YAMLError as error:
        raise Unreadable(0, f"is not YAML: {error}") from error
    except RecursionError:
        raise Unreadable(0, "is nested too deeply") from None
    finally:
        loader.dispose()
    if node is None:
        return None
    try:
        return _Nodes(fault, node).value(node)
    except RecursionError:
        raise Unreadable(0, "is nested too deeply") from None


def _yaml_fault(error: yaml.MarkedYAMLError, text: str) -> Unreadable:
    mark = error.problem_mark or error.context_mark
    line = 0 if mark is None else mark.line + 1
    rows = text.splitlines()
    row = rows[line - 1] if 0 < line <= len(rows) else ""
    if "\t" in row[: len(row) - len(row.lstrip())]:
        return Unreadable(line, "a tab stands in the indentation; YAML wants spaces")
    problem = error.problem or "is not YAML"
    if ("document" in problem and "another" in problem) or "expected a single document" in str(error.context):
        return Unreadable(line, "holds a second document (---); a plan is one document")
    context = f" ({error.context}, line {error.context_mark.line + 1})" if error.context and error.context_mark else ""
    return Unreadable(line, f"is not YAML: {problem}{context}")


class _Nodes:
    """One document's nodes on their way to values; counts what aliases unfold to."""

    def __init__(self, fault: Fault, root: yaml.Node) -> None:
        self.fault = fault
        self.seen: set[int] = set()
        self.open: set[int] = set()
        self.again = 0
        self.allowed = UNFOLDED_PER_NODE * _count(root) + 1_000

    def value(self, node: yaml.Node) -> Any:
        """Return the value of *node*; raises Unreadable when the document unfolds without end."""
        line = node.start_mark.line + 1
        if id(node) in self.seen:
            self.again += 1
            if self.again > self.allowed:
                raise Unreadable(line, "aliases (*name) unfold to many times the size of the file")
            if id(node) in self.open:
                raise Unreadable(line, "an alias (*name) stands inside of what it names")
        self.seen.add(id(node))
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, line)
        if node.tag not in (_TAG + "map", _TAG + "seq"):
            self.fault(line, f"the tag {_tag(node)} is not supported")
            return None
        self.open.add(id(node))
        made = self._table(node, line) if isinstance(node, yaml.MappingNode) else self._row(node)
        self.open.discard(id(node))
        return made

    def _row(self, node: yaml.Node) -> Row:
        row = Row()
        for child in node.value:
            row.lines.append(child.start_mark.line + 1)
            row.append(self.value(child))
        return row

    def _table(self, node: yaml.MappingNode, line: int) -> Table:
        table = Table(line)
        merged: list[Table] = []
        for key_node, child in node.value:
            at = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                self.fault(at, "a key has to be plain text")
                continue
            if key_node.tag == _TAG + "merge":
                given = self.value(child)
                for each in given if isinstance(given, Row) else [given]:
                    if isinstance(each, Table):
                        merged.append(each)
                    else:
                        self.fault(at, "<< wants a mapping, or a list of mappings")
                continue
            key = key_node.value
            if key in table:
                self.fault(at, f"the key {key!r} stands here again, first in line {table.lines[key]}")
                continue
            table.lines[key] = at
            table[key] = self.value(child)
        for each in merged:
            for key in each:
                if key not in table:
                    table[key] = each[key]
                    table.lines[key] = each.lines[key]
        return table

    def _scalar(self, node: yaml.ScalarNode, line: int) -> Any:
        text, kind = node.value, node.tag.removeprefix(_TAG)
        try:
            if kind in ("str", "merge"):
                return text
            if kind == "null":
                return None
            if kind == "bool":
                return {"true": True, "false": False}[text.lower()]
            if kind == "int":
                return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
            if kind == "float":
                return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        except (ValueError, KeyError):
            self.fault(line, f"{text[:40]!r} is not a value of kind {kind}")
            return None
        self.fault(line, f"the tag {_tag(node)} is not supported")
        return None


def _tag(node: yaml.Node) -> str:
    tag = str(node.tag)
    return "!!" + tag.removeprefix(_TAG) if tag.startswith(_TAG) else tag


def _count(root: yaml.Node) -> int:
    """Return the number of nodes, each counted once however many aliases it has."""
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            for pair in node.value:
                waiting.extend(pair)
        elif isinstance(node, yaml.SequenceNode):
            waiting.extend(node.value)
    return len(seen)
