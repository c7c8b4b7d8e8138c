"""Settings: where they come from, what goes before what, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import InvalidInput
from orchestrator.settings import KEYS, Settings

FULL = """
database_url = "postgresql://file/db"
pooler = "transaction"
concurrency = 3
heartbeat = 2
lease = 8.5
sweep = 1
poll = 0.5
grace = 0
max_retries = 0
give_up_after = 60
redact = ["API_KEY"]
tracing = "on"
retry = {initial = 1, factor = 3, max = 9}
[retention]
done = "30d"
[alerts]
oldest_wait = 60
[prices.m]
input = 1.25
output = 10
[agents.coder]
command = ["true"]
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A configuration file that sets everything."""
    path = tmp_path / "conf.toml"
    path.write_text(FULL)
    return path


def test_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a file and without variables the documented defaults hold."""
    monkeypatch.chdir(tmp_path)
    settings = Settings.load(env={})
    assert settings == Settings()
    assert (settings.database_url, settings.concurrency, settings.max_retries) == (None, None, 2)
    assert (settings.heartbeat, settings.lease, settings.sweep, settings.poll, settings.grace) == (10, 40, 5, 1, 20)
    assert (settings.retry_initial, settings.retry_factor, settings.retry_max) == (5, 2, 600)
    assert settings.give_up_after == 24 * 3600


def test_everything_from_the_file(config: Path) -> None:
    """Each key of the file arrives; agents, alerts and retention stay as they are; paths start at the file's directory."""
    settings = Settings.load(config, {})
    assert settings.database_url == "postgresql://file/db"
    assert (settings.pooler, settings.concurrency, settings.heartbeat, settings.lease) == ("transaction", 3, 2, 8.5)
    assert (settings.sweep, settings.poll, settings.grace, settings.max_retries) == (1, 0.5, 0, 0)
    assert (settings.retry_initial, settings.retry_factor, settings.retry_max) == (1, 3, 9)
    assert (settings.give_up_after, settings.redact) == (60, ("API_KEY",))
    assert settings.agents == {"coder": {"command": ["true"]}}
    assert settings.retention == {"done": "30d"}
    assert settings.tracing == "on"
    assert settings.alerts == {"oldest_wait": 60}
    assert settings.prices == {"m": {"input": 1.25, "output": 10, "cached": 1.25}}
    assert (settings.source, settings.source_dir) == (config, config.parent)
    assert all(key.split(".")[0] in FULL for key in KEYS)


def test_which_file(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An argument goes before ORCHESTRATOR_CONFIG, that before orchestrator.toml in the working directory."""
    monkeypatch.chdir(tmp_path)
    Path("orchestrator.toml").write_text("concurrency = 1")
    Path("env.toml").write_text("concurrency = 2")
    assert Settings.load(env={}).concurrency == 1
    assert Settings.load(env={"ORCHESTRATOR_CONFIG": ""}).concurrency == 1
    assert Settings.load(env={"ORCHESTRATOR_CONFIG": "env.toml"}).concurrency == 2
    assert Settings.load(config, {"ORCHESTRATOR_CONFIG": "env.toml"}).concurrency == 3


def test_the_environment_goes_before_the_file(config: Path) -> None:
    """ORCHESTRATOR_DATABASE_URL wins over the file; an empty one counts as not set."""
    assert Settings.load(config, {"ORCHESTRATOR_DATABASE_URL": "postgresql://env"}).database_url == "postgresql://env"
    assert Settings.load(config, {"ORCHESTRATOR_DATABASE_URL": ""}).database_url == "postgresql://file/db"


def test_options_go_before_all() -> None:
    """changed() sets what is not None, and checks the whole again."""
    settings = Settings(heartbeat=4)
    assert settings.changed(lease=20, heartbeat=None) == Settings(heartbeat=4, lease=20)
    with pytest.raises(InvalidInput, match="heartbeat"):
        settings.changed(lease=7)


def test_heartbeat_of_more_than_half_a_lease_is_refused() -> None:
    """One clear message with both numbers and the remedy; exactly half is allowed."""
    assert Settings(heartbeat=20, lease=40).heartbeat == 20
    with pytest.raises(InvalidInput, match=r"heartbeat of 21 s is more than half of the lease of 40 s") as caught:
        Settings(heartbeat=21, lease=40)
    assert caught.value.hint == "set heartbeat to 20 or less, or lease to 42 or more"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("heartbeet = 1", r"conf.toml: unknown key 'heartbeet'; did you mean 'heartbeat'\?"),
        ("[agent.x]\ncommand = []", r"unknown key 'agent'; did you mean 'agents'\?"),
        ("retry = {inital = 1}", r"unknown key 'retry.inital'; did you mean 'initial'\?"),
        ("retry = 3", "retry: expected a table"),
        ("agents = 3", "agents: expected a table"),
        ("[agents]\nx = 3", "agents.x: expected a table"),
        ("pooler = 'statement'", "pooler: expected one of none, session, transaction, found 'statement'"),
        ("database_url = 5", "database_url: expected text, found 5"),
        ("redact = 'X'", "redact: expected a list of texts"),
        ("concurrency = 0", "concurrency: expected a whole number, 1 or more, found 0"),
        ("concurrency = 1.5", "concurrency: expected a whole number"),
        ("poll = true", "poll: expected a number of seconds, more than 0, found True"),
        ("poll = nan", "poll: expected a number of seconds"),
        ("lease = '40s'", "lease: expected a number of seconds, more than 0, found '40s'"),
        ("retry = {initial = 0}", "retry.initial: expected a number of seconds, more than 0, found 0"),
        ("heartbeat = 30", "conf.toml: heartbeat of 30 s is more than half"),
        ("x = \n", r"is not TOML: .*line 1"),
        ("x = " + "[" * 5000, "is nested too deeply|is not TOML"),
        ("poll = " + "9" * 5000, "a number of more digits than can be read"),
    ],
)
def test_what_is_refused(text: str, says: str, tmp_path: Path) -> None:
    """A wrong file is one error of exit code 2 that names the file, the key and what was expected."""
    path = tmp_path / "conf.toml"
    path.write_text(text)
    with pytest.raises(InvalidInput, match=says) as caught:
        Settings.load(path, {})
    assert caught.value.exit_code == 2
    assert "conf.toml" in caught.value.message


def test_the_line_of_an_unknown_key_is_named(tmp_path: Path) -> None:
    """The hint says where the unknown key stands."""
    path = tmp_path / "conf.toml"
    path.write_text("# heartbeet\npoll = 1\n  heartbeet = 2\n")
    with pytest.raises(InvalidInput) as caught:
        Settings.load(path, {})
    assert caught.value.hint == "it stands in line 3"


@pytest.mark.parametrize("where", ["argument", "environment"])
def test_a_named_file_has_to_be_there(where: str, tmp_path: Path) -> None:
    """A file that was asked for and cannot be read is an error, whichever way it was named."""
    gone = str(tmp_path / "gone.toml")
    arguments: dict[str, Any] = (
        {"config": gone, "env": {}} if where == "argument" else {"env": {"ORCHESTRATOR_CONFIG": gone}}
    )
    with pytest.raises(InvalidInput, match=r"gone.toml: cannot be read: No such file"):
        Settings.load(**arguments)


def test_encoding(tmp_path: Path) -> None:
    """A byte order mark is no fault; bytes that are not UTF-8 are one, with their line."""
    path = tmp_path / "conf.toml"
    path.write_bytes(b"\xef\xbb\xbfpoll = 2")
    assert Settings.load(path, {}).poll == 2
    path.write_bytes(b"poll = 2\n# caf\xe9\n")
    with pytest.raises(InvalidInput, match="line 2: is not UTF-8"):
        Settings.load(path, {})


def test_importing_reads_nothing(tmp_path: Path) -> None:
    """The import succeeds beside a broken file and with a broken variable: nothing is looked at."""
    (tmp_path / "orchestrator.toml").write_text("broken")
    code = "import orchestrator.settings"
    root = str(Path(__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": root, "ORCHESTRATOR_CONFIG": "gone"},
        capture_output=True,
        stdin=subprocess.DEVNULL,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, b"")
