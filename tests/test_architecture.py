"""The house itself: what importing costs and touches, where SQL may stand, and that the ADRs named in code exist."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import orchestrator

PACKAGE = Path(orchestrator.__file__).parent
ROOT = PACKAGE.parent


def test_importing_the_package_loads_nothing_heavy() -> None:
    """`import orchestrator` brings neither SQLAlchemy nor psycopg, typer, rich or yaml."""
    code = (
        "import sys, orchestrator; "
        "print(sorted({'sqlalchemy','psycopg','typer','rich','yaml','tenacity','alembic'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_every_public_name_can_be_had() -> None:
    """Everything in __all__ loads, and an unknown name is an AttributeError."""
    for name in orchestrator.__all__:
        assert getattr(orchestrator, name) is not None
    assert not hasattr(orchestrator, "nothing_of_that_name")


def test_skip_locked_stands_in_repositories_only() -> None:
    """Locking is the repositories' business: nowhere else is a row locked."""
    found = [
        path.relative_to(PACKAGE).as_posix()
        for path in sorted(PACKAGE.rglob("*.py"))
        if re.search(r"with_for_update|SKIP LOCKED", path.read_text())
    ]
    assert found
    assert all(path.startswith(("repositories/", "database/", "domain/")) for path in found), found


def test_the_claim_query_is_the_first_method_of_its_repository() -> None:
    """A reader who opens repositories/tasks.py meets claim() first."""
    source = (PACKAGE / "repositories" / "tasks.py").read_text()
    body = source[source.index("class TaskRepository") :]
    methods = re.findall(r"^    def (\w+)", body, re.M)
    assert next(name for name in methods if not name.startswith("_")) == "claim"


def test_every_adr_that_the_code_names_exists() -> None:
    """A comment that cites ADR-nnnn cites a page that is there."""
    cited = set()
    for path in [*PACKAGE.rglob("*.py"), *(ROOT / "docs").rglob("*.md")]:
        cited |= set(re.findall(r"ADR-(\d{4})", path.read_text()))
    there = {path.name[:4] for path in (ROOT / "docs" / "adr").glob("*.md")}
    assert cited <= there, cited - there


def test_every_test_that_the_docs_name_exists() -> None:
    """An ADR that says what holds it names a file of the suite."""
    named = set()
    for path in (ROOT / "docs").rglob("*.md"):
        named |= set(re.findall(r"`tests/(test_\w+\.py)", path.read_text()))
    missing = {name for name in named if not (ROOT / "tests" / name).exists()}
    assert not missing


def test_every_dependency_has_its_reason_in_the_docs() -> None:
    """docs/dependencies.md names each package that pyproject.toml asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [
        *project["project"]["dependencies"],
        *(each for extra in project["project"]["optional-dependencies"].values() for each in extra),
        *project["dependency-groups"]["dev"],
    ]
    names = {re.split(r"[\[<>=~! ]", each)[0].lower() for each in wanted}
    page = (ROOT / "docs" / "dependencies.md").read_text().lower()
    assert not {name for name in names if name not in page}
