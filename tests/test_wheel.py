"""The built wheel: what an installation without this checkout has."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_wheel_has_the_migrations_and_runs_without_the_checkout(tmp_path: Path, empty_database: str) -> None:
    """Built from a copy and unpacked elsewhere, it shows its help, upgrades an empty database, adds and lists a task."""
    source = tmp_path / "source"
    source.mkdir()
    for name in ("orchestrator", "migrations"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")],
        cwd=source,
        check=True,
        capture_output=True,
    )
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        packed.extractall(site)
    assert "orchestrator/_migrations/env.py" in names
    assert "orchestrator/py.typed" in names
    assert not [name for name in names if name.startswith(("tests/", "scripts/"))]

    def run(*arguments: str) -> str:
        # The unpacked wheel comes before the checkout, which the development environment has on its path.
        code = f"import sys; sys.path.insert(0, {str(site)!r}); from orchestrator.__main__ import main; main()"
        environment = {**os.environ, "ORCHESTRATOR_DATABASE_URL": empty_database}
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            cwd=tmp_path,
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        )
        return done.stdout

    assert "orchestrator run plan.yaml" in run("--help")
    run("db", "upgrade")
    assert '"created": true' in run("add", "coder", "--input", "x", "--force", "--json")
    assert "coder" in run("list")
