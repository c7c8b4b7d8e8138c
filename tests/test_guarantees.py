"""``docs/guarantees.md``: every sentence of it names tests, and those tests are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "guarantees.md"
REFERENCE = re.compile(r"\[(test_\w+\.py)::(test_\w+)\]")


def sentences() -> list[str]:
    """The items of all lists, each on one line."""
    items: list[str] = []
    for line in PAGE.read_text().splitlines():
        if line.startswith("- "):
            items.append(line[2:])
        elif line.startswith("  "):
            items[-1] += " " + line.strip()
    return items


def test_every_guarantee_names_its_tests() -> None:
    """A sentence without a test is a wish."""
    found = sentences()
    assert len(found) > 30
    assert [sentence for sentence in found if not REFERENCE.search(sentence)] == []


def test_nothing_is_promised_outside_of_the_lists() -> None:
    """Under a heading there are list items alone; only the page's own introduction is prose."""
    sections = PAGE.read_text().split("\n## ")[1:]
    lines = [line for section in sections for line in section.splitlines()[1:]]
    assert [line for line in lines if line and not line.startswith(("- ", "  "))] == []


def test_the_tests_that_it_names_exist() -> None:
    """Whoever renames or removes a test has to look at what it guaranteed."""
    missing = []
    for sentence in sentences():
        for file, name in REFERENCE.findall(sentence):
            path = ROOT / "tests" / file
            tree = ast.parse(path.read_text()) if path.exists() else ast.Module([], [])
            if not any(isinstance(each, ast.FunctionDef) and each.name == name for each in ast.walk(tree)):
                missing.append(f"{file}::{name}")
    assert missing == []
