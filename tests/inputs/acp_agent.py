"""An agent of the Agent Client Protocol for tests, made with the protocol's own package. The prompt says what it does.

say TEXT · tool KIND (asks for permission, says what came of it) · hang · stop REASON · error JSON · die · noise
Sessions are files in the directory of $ACP_SESSIONS, if that is set.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from uuid import uuid4

import acp
from acp.schema import (
    AgentCapabilities,
    AgentMessageChunk,
    Cost,
    PermissionOption,
    TextContentBlock,
    ToolCallUpdate,
    Usage,
    UsageUpdate,
)

FOLDER = os.environ.get("ACP_SESSIONS", "")


class Agent:
    def __init__(self) -> None:
        self.stopped = asyncio.Event()
        self.signed_in = not os.environ.get("ACP_LOGIN")

    def on_connect(self, conn) -> None:
        self.client = conn

    async def initialize(self, protocol_version, client_capabilities=None, client_info=None, **_):
        return acp.InitializeResponse(
            protocol_version=protocol_version, agent_capabilities=AgentCapabilities(load_session=bool(FOLDER))
        )

    async def authenticate(self, method_id, **_):
        self.signed_in = method_id == "a-key"
        return acp.AuthenticateResponse()

    async def new_session(self, cwd, **_):
        if not self.signed_in:
            raise acp.RequestError.auth_required()
        session = str(uuid4())
        if FOLDER:
            (Path(FOLDER) / session).write_text("")
        return acp.NewSessionResponse(session_id=session)

    async def load_session(self, cwd, session_id, **_):
        try:
            for line in (Path(FOLDER) / session_id).read_text().splitlines():
                await self.say(session_id, "again: " + line)
        except OSError:
            raise acp.RequestError(-32603, "Internal error", {"details": "Invalid session identifier"}) from None
        return acp.LoadSessionResponse()

    async def cancel(self, session_id, **_):
        self.stopped.set()

    async def say(self, session, text):
        update = AgentMessageChunk(
            content=TextContentBlock(type="text", text=text), session_update="agent_message_chunk"
        )
        await self.client.session_update(session_id=session, update=update)

    async def prompt(self, session_id, prompt, **_):
        text = "".join(block.text for block in prompt)
        if FOLDER:
            with (Path(FOLDER) / session_id).open("a") as file:
                file.write(text + "\n")
        word, _, rest = text.partition(" ")
        reason = "end_turn"
        if word == "say":
            for at in range(0, len(rest), 5):
                await self.say(session_id, rest[at : at + 5])
        elif word == "tool":
            await self.say(session_id, "before the tool")
            start = acp.start_tool_call("t1", "run it", kind=rest, status="pending", raw_input={"command": "ls"})
            await self.client.session_update(session_id=session_id, update=start)
            options = [
                PermissionOption(option_id="y", name="yes", kind="allow_once"),
                PermissionOption(option_id="n", name="no", kind="reject_once"),
            ]
            call = ToolCallUpdate(tool_call_id="t1", title="run it", kind=rest)
            answer = await self.client.request_permission(session_id=session_id, tool_call=call, options=options)
            chosen = getattr(answer.outcome, "option_id", "cancelled")
            end = acp.update_tool_call("t1", status="completed", content=[acp.tool_content(acp.text_block("listed"))])
            await self.client.session_update(session_id=session_id, update=end)
            await self.say(session_id, f"answered {chosen}")
        elif word == "hang":
            await self.say(session_id, "hanging")
            await self.stopped.wait()
            reason = "cancelled"
        elif word == "stop":
            reason = rest
        elif word == "error":
            told = json.loads(rest)
            raise acp.RequestError(told["code"], told["message"], told.get("data"))
        elif word == "die":
            print("out of memory", file=sys.stderr, flush=True)
            os._exit(3)
        elif word == "noise":
            sys.stdout.write("Welcome!\nnot {json\n")
            sys.stdout.flush()
            await self.say(session_id, "quiet")
        cost = UsageUpdate(used=5, size=100, cost=Cost(amount=0.25, currency="USD"), session_update="usage_update")
        await self.client.session_update(session_id=session_id, update=cost)
        return acp.PromptResponse(
            stop_reason=reason, usage=Usage(input_tokens=10, output_tokens=2, total_tokens=12, cached_read_tokens=3)
        )


asyncio.run(acp.run_agent(Agent()))
