"""The real agent CLIs of ``scripts/test-real-agents``: their settings for the model server, and their recipes.

The definitions are those of ``docs/agents/``, word for word. Everything else (the address of the model server, a home of
their own) comes to them as it comes to a user's: by the worker's environment and their own settings files.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from orchestrator.agents.building import build
from orchestrator.agents.protocol import Agent
from orchestrator.plans import agent_definition

ROOT = Path(__file__).resolve().parents[2]
KEY = "mock-key-0123456789"
FOLDER = "TEST_AGENTS_FOLDER"


@dataclass
class ModelServer:
    """The model server of these tests, as a process of its own."""

    port: int
    next_look: float = 0.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def requests(self) -> list[dict[str, Any]]:
        """Every request that it was sent."""
        with urllib.request.urlopen(f"{self.url}/_mock/requests", timeout=30) as answer:
            found = json.load(answer)
        assert isinstance(found, list)
        return found

    def asked(self, words: str) -> bool:
        """Whether a prompt that it was sent held *words*; looked at ten times a second at most."""
        if time.monotonic() < self.next_look:
            return False
        self.next_look = time.monotonic() + 0.1
        with urllib.request.urlopen(f"{self.url}/_mock/asked?{urllib.parse.quote(words)}", timeout=60) as answer:
            return bool(answer.read() == b"yes")


@contextmanager
def model_server() -> Iterator[ModelServer]:
    """A model server on a port of its own."""
    program = ROOT / "tests" / "inputs" / "mock_model_server.py"
    with subprocess.Popen(
        [sys.executable, str(program), "--port", "0", "--quiet"], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield ModelServer(int(process.stdout.readline().rsplit(":", 1)[1]))
        finally:
            process.terminate()


def folder() -> Path:
    """Where the CLIs are installed."""
    named = os.environ.get(FOLDER)
    assert named, f"{FOLDER} is not set: run scripts/test-real-agents"
    return Path(named)


def recipe(page: str) -> dict[str, Any]:
    """The agents of the first YAML block of a page of ``docs/agents/``."""
    text = (ROOT / "docs" / "agents" / f"{page}.md").read_text()
    found = re.search(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert found is not None, page
    agents = yaml.safe_load(found[1])["agents"]
    assert isinstance(agents, dict)
    return agents


def blocks(page: str, language: str) -> list[str]:
    """The blocks of a page in *language*."""
    text = (ROOT / "docs" / "agents" / f"{page}.md").read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@dataclass
class Cli:
    """One CLI: its recipe, a home, and what it is told there."""

    page: str
    home: Path
    server: ModelServer
    env: dict[str, str] = field(default_factory=dict)

    def prepare(self) -> None:
        """Make the home and write the settings."""
        self.home.mkdir(exist_ok=True)
        tree = folder()
        programs = [tree / "node_modules" / ".bin", tree / "python" / "bin", tree / "aider" / "bin"]
        self.env = {
            "PATH": os.pathsep.join([*map(str, programs), os.environ["PATH"]]),
            "HOME": str(self.home),
            "TMPDIR": str(self.home),
            **{f"XDG_{kind}_HOME": str(self.home / kind.lower()) for kind in ("CONFIG", "DATA", "CACHE", "STATE")},
            "NO_PROXY": "127.0.0.1,localhost",
            "no_proxy": "127.0.0.1,localhost",
        }
        getattr(self, "_" + self.page.replace("-", "_"))()

    def acp(self, *command: str, **fields: Any) -> Agent:
        """The same CLI as an agent of the Agent Client Protocol."""
        return build(agent_definition("acp", {"acp": list(command), "dir": str(self.work), **fields}))

    def agent(self, **fields: Any) -> Agent:
        """The recipe as an agent that works in the home; *fields* go before it."""
        ((name, given),) = recipe(self.page).items()
        return build(agent_definition(name, {"dir": str(self.work), **given, **fields}))

    @property
    def work(self) -> Path:
        """The directory that it works in."""
        work = self.home / "work"
        work.mkdir(exist_ok=True)
        return work

    def left(self) -> list[str]:
        """The command lines of processes of this home."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("HOME") == str(self.home):
                    found.append(" ".join(process.cmdline()))
            except psutil.Error:
                continue
        return found

    def kill(self) -> int:
        """End all processes of this home by SIGKILL, as the system does when memory runs out; return how many."""
        count = 0
        for process in psutil.process_iter():
            try:
                if process.environ().get("HOME") == str(self.home):
                    process.kill()
                    count += 1
            except psutil.Error:
                continue
        return count

    def _claude_code(self) -> None:
        self.env |= {
            "ANTHROPIC_BASE_URL": self.server.url,
            "ANTHROPIC_API_KEY": KEY,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "DISABLE_TELEMETRY": "1",
            "DISABLE_ERROR_REPORTING": "1",
        }

    def _codex(self) -> None:
        self.env["OPENAI_API_KEY"] = KEY
        settings = self.home / ".codex"
        settings.mkdir(exist_ok=True)
        (settings / "config.toml").write_text(
            f"""\
model = "mock-model"
model_provider = "mock"
check_for_update_on_startup = false
[model_providers.mock]
name = "mock"
base_url = "{self.server.url}/v1"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
[analytics]
enabled = false
"""
        )

    def _gemini(self) -> None:
        self.env |= {
            "GOOGLE_GEMINI_BASE_URL": self.server.url,
            "GEMINI_API_KEY": KEY,
            "GEMINI_TELEMETRY_ENABLED": "false",
        }
        settings = self.home / ".gemini"
        settings.mkdir(exist_ok=True)
        told = {
            "security": {"auth": {"selectedType": "gemini-api-key"}},
            "privacy": {"usageStatisticsEnabled": False},
            "general": {"enableAutoUpdate": False, "maxAttempts": 2},
        }
        (settings / "settings.json").write_text(json.dumps(told))

    def permissions(self, told: dict[str, str]) -> None:
        """What OpenCode asks leave for; Gemini CLI asks by itself."""
        if self.page == "opencode":
            path = self.work / "opencode.json"
            path.write_text(json.dumps({**json.loads(path.read_text()), "permission": told}))

    def _opencode(self) -> None:
        self.env |= {"OPENAI_API_KEY": KEY, "OPENCODE_DISABLE_MODELS_FETCH": "1"}
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "name": "mock",
            "options": {"baseURL": f"{self.server.url}/v1", "apiKey": "{env:OPENAI_API_KEY}"},
            "models": {"mock-model": {"name": "mock"}},
        }
        told = {
            "autoupdate": False,
            "share": "disabled",
            "model": "mock/mock-model",
            "small_model": "mock/mock-model",
            "provider": {"mock": provider},
        }
        (self.work / "opencode.json").write_text(json.dumps(told))

    def _openai(self) -> None:
        self.env |= {
            "OPENAI_BASE_URL": f"{self.server.url}/v1",
            "OPENAI_API_BASE": f"{self.server.url}/v1",
            "OPENAI_API_KEY": KEY,
        }

    def _mini_swe_agent(self) -> None:
        self._openai()
        self.env |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "MSWEA_COST_TRACKING": "ignore_errors"}

    def _llm(self) -> None:
        self._openai()
        settings = self.home / "llm"
        settings.mkdir(exist_ok=True)
        self.env["LLM_USER_PATH"] = str(settings)
        model = {"model_id": "mock-model", "model_name": "mock-model", "api_base": f"{self.server.url}/v1"}
        (settings / "extra-openai-models.yaml").write_text(yaml.safe_dump([{**model, "api_key_name": "openai"}]))

    def _aider(self) -> None:
        self._openai()
        self.env |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        if not (self.work / ".git").exists():
            subprocess.run(["git", "init", "-q", str(self.work)], check=True, env={**os.environ, **self.env})


__all__ = ["FOLDER", "KEY", "ROOT", "Cli", "ModelServer", "blocks", "folder", "model_server", "recipe"]
