"""The scripts, without running what they start: they parse, find Python, and the locks are fit to install from."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = [
    "scripts/quickstart",
    "scripts/test",
    "scripts/test-real-agents",
    "scripts/check",
    "scripts/lock",
    "scripts/bench",
    "scripts/chaos",
    "scripts/environment",
    ".ci/run",
]
LOCKS = ["requirements.lock", "requirements-dev.lock"]


def shell(code: str, folder: Path, path: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in sh, with only ``path`` to find programs in."""
    sh = shutil.which("sh")
    assert sh is not None
    return subprocess.run(
        [sh, "-c", code, "script"],
        cwd=folder,
        env={"PATH": path, "HOME": str(folder), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_parse(name: str) -> None:
    """Every script is valid shell, and those that are commands can be executed."""
    path = ROOT / name
    first = path.read_text().splitlines()[0]
    shells = ["bash"] if "bash" in first else ["sh", "bash"]
    for program in shells:
        subprocess.run([program, "-n", str(path)], check=True)
    assert os.access(path, os.X_OK) is first.startswith("#!")


@pytest.mark.parametrize("name", LOCKS)
def test_locks_have_hashes_and_no_addresses(name: str) -> None:
    """Every package is pinned exactly and hashed; nothing says where it is to be fetched from."""
    text = (ROOT / name).read_text()
    assert "://" not in text
    assert "--index" not in text
    assert "--find-links" not in text
    entries = re.split(r"\n(?=[a-z])", re.sub(r"(?m)^#.*\n", "", text))
    assert len(entries) > 15
    for entry in entries:
        assert re.match(r"[a-z0-9.-]+==[^ ]+( ; [^\\]+)? \\\n", entry), entry
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), entry


def test_the_dev_lock_has_the_same_versions() -> None:
    """Who installs the development packages gets the very packages that users get."""
    pins = [set(re.findall(r"(?m)^([a-z0-9.-]+==[^ ]+)", (ROOT / name).read_text())) for name in LOCKS]
    assert pins[0] - pins[1] == set()


def test_the_locks_are_of_this_project() -> None:
    """A dependency that was changed without scripts/lock fails here."""
    result = subprocess.run([ROOT / "scripts/lock", "--check"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_no_python_at_all(tmp_path: Path) -> None:
    """Without a Python that is recent enough the message names the version and what was found."""
    old = tmp_path / "python3"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.9.2" && exit 0\nexit 1\n')
    old.chmod(0o755)
    result = shell(f". {ROOT}/scripts/environment; find_python", tmp_path, str(tmp_path))
    assert result.returncode == 1
    assert "Python 3.11 or later is needed; found: python3 (Python 3.9.2)" in result.stderr


def test_a_python_without_venv(tmp_path: Path) -> None:
    """Debian's Python without its venv package is told apart, with the package's name."""
    bare = tmp_path / "python3"
    bare.write_text('#!/bin/sh\ncase "$2" in *ensurepip*) exit 1 ;; esac\nexit 0\n')
    bare.chmod(0o755)
    result = shell(f". {ROOT}/scripts/environment; find_python", tmp_path, str(tmp_path))
    assert result.returncode == 1
    assert "python3-venv" in result.stderr


def test_the_newest_suitable_python_is_taken(tmp_path: Path) -> None:
    """A suitable python3.12 wins over an old python3."""
    for name, code in (("python3.12", 0), ("python3", 1)):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\nexit {code}\n")
        program.chmod(0o755)
    result = shell(f". {ROOT}/scripts/environment; find_python", tmp_path, str(tmp_path))
    assert result.stdout.strip() == str(tmp_path / "python3.12")


def test_an_environment_that_is_up_to_date_is_left_alone(tmp_path: Path) -> None:
    """The stamp is of the lock and the project file: a change of either installs again, nothing else does."""
    for name in ("requirements.lock", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    path = os.environ["PATH"]
    code = f". {ROOT}/scripts/environment; needs_install requirements.lock && echo needed || echo not needed"

    def asks() -> str:
        return shell(code, tmp_path, path).stdout.strip()

    assert asks() == "needed"
    made = f'. {ROOT}/scripts/environment; "$(find_python)" -m venv --without-pip .venv'
    assert shell(made, tmp_path, path).returncode == 0
    assert asks() == "needed"
    stamp = (
        f". {ROOT}/scripts/environment; digest_of .venv/bin/python requirements.lock >.venv/installed-requirements.lock"
    )
    assert shell(stamp, tmp_path, path).returncode == 0
    assert asks() == "not needed"
    with (tmp_path / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    assert asks() == "needed"


def test_quickstart_explains_itself() -> None:
    """--help says what it does and installs nothing."""
    result = subprocess.run([ROOT / "scripts/quickstart", "--help"], capture_output=True, text=True, check=True)
    assert "embedded PostgreSQL" in result.stdout


@pytest.mark.slow
def test_agents_that_cannot_be_installed(tmp_path: Path) -> None:
    """The installation of the real agent CLIs stops at its first failure, says which, and is not taken for complete."""
    done = subprocess.run(
        [ROOT / "scripts" / "test-real-agents", "--install"],
        env={**os.environ, "TEST_AGENTS_CACHE": str(tmp_path), "UV_OFFLINE": "1", "UV_NO_CACHE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "the packages of tests/real/requirements.lock could not be installed" in done.stderr
    assert "test-real-agents: the agent CLIs could not be installed; see the messages above" in done.stderr
    assert list(tmp_path.glob("*/complete")) == []
    assert list(tmp_path.glob("*/node_modules")) == []
