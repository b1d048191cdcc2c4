"""Puts agents into a database in bulk, exactly as a launch leaves them: hundreds of requests would only delay a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

import asyncpg
import msgspec

from bench.workload import TOOL, opening_text
from omnara.db import secrets
from omnara.db.secrets import SealedRow
from omnara.domain.config import BuiltInTool, Definition, ModelChoice, Permission, compiled
from omnara.engine.catalog import SECRET_FIELD
from omnara.ids import IdKind, encode, new_uuid
from omnara.vault import KeyRing, seal, secret_aad

__all__ = ["Seeded", "is_idle", "make_ready", "seed", "seed_input", "seed_inputs"]


class Seeded(msgspec.Struct, frozen=True):
    """What was made."""

    org_id: UUID
    project_id: UUID
    config_id: UUID
    revision_id: UUID
    agents: tuple[UUID, ...]


async def seed(
    dsn: str,
    agents: int,
    ring: KeyRing,
    *,
    base_url: str = "http://127.0.0.1:9",
    ready: bool = True,
    opened: bool = True,
) -> Seeded:
    """Make an organization, a model behind `base_url` and agents with the bench's tool and one message each.

    With `ready` every agent may be claimed at once, otherwise after `make_ready`. Not `opened`, agents have no message
    and nothing to do. One transaction. The model's key is sealed with `ring`, which the engine must be given too.
    """
    conn = await asyncpg.connect(dsn)
    try:
        async with conn.transaction():
            made = await _model(conn, ring, base_url)
            ids = tuple(sorted(new_uuid() for _ in range(agents)))
            await _agents(conn, made, ids, ready=ready and opened)
            if opened:
                await _open(conn, ids)
        await conn.execute("vacuum analyze")
    finally:
        await conn.close()
    return msgspec.structs.replace(made, agents=ids)


async def make_ready(dsn: str) -> None:
    """Let every agent be claimed."""
    conn = await asyncpg.connect(dsn)
    try:
        await conn.execute("update agent_sched set ready_at = statement_timestamp() where worker_id is null")
    finally:
        await conn.close()


async def is_idle(conn: Any) -> bool:
    """Whether no agent is claimed or ready."""
    return not await conn.fetchval(
        "select exists (select from agent_sched where worker_id is not null or ready_at is not null)"
    )


async def seed_input(conn: Any, agent_id: UUID, text: str) -> None:
    """Queue one message for an agent, as the API's statement does, and make the agent ready."""
    content = msgspec.json.encode([{"type": "text", "text": text}]).decode()
    await conn.execute(_SEND, agent_id, new_uuid(), content)


async def seed_inputs(conn: Any, agents: Sequence[UUID], text: str) -> None:
    """Queue the same message for many agents, each in a transaction of its own."""
    content = msgspec.json.encode([{"type": "text", "text": text}]).decode()
    for agent_id in agents:
        await conn.execute(_SEND, agent_id, new_uuid(), content)


_SEND = """
with hot as (
  update agent_sched set next_rank = next_rank + 1024, inputs_gen = inputs_gen + 1,
    ready_at = least(coalesce(ready_at, statement_timestamp()), statement_timestamp())
  where agent_id = $1 returning agent_id, next_rank - 1024 as rank)
insert into inputs (agent_id, id, kind, delivery_mode, state, rank, content)
select agent_id, $2, 'content', 'queued', 'received', rank, $3::json from hot
"""


async def _model(conn: Any, ring: KeyRing, base_url: str) -> Seeded:
    org, project, provider, model, revision, config = (new_uuid() for _ in range(6))
    await conn.execute("insert into orgs (id, name) values ($1, 'bench')", org)
    await conn.execute("insert into projects (id, org_id, name) values ($1, $2, 'bench')", project, org)
    await conn.execute(
        "insert into model_provider_configs (id, org_id, name, api_format, base_url, request_path, auth_kind, "
        "secret_id) values ($1, $2, 'bench', 'openai_chat_completions', $3, '/chat/completions', 'bearer_token', $4)",
        provider, org, base_url, await _key(conn, ring, org),
    )  # fmt: skip
    await conn.execute(
        "insert into configured_models (id, org_id, provider_config_id, name, current_revision_id) "
        "values ($1, $2, $3, 'bench', $4)",
        model, org, provider, revision,
    )  # fmt: skip
    await conn.execute(
        "insert into configured_model_revisions (id, configured_model_id, revision, provider_model_slug, "
        "context_window_tokens, max_output_tokens) values ($1, $2, 1, 'bench', 100000000, 4096)",
        revision, model,
    )  # fmt: skip
    await conn.execute(
        "insert into project_model_grants (id, project_id, configured_model_id) values ($1, $2, $3)",
        new_uuid(), project, model,
    )  # fmt: skip
    tool = BuiltInTool(Permission("always_allow", {}))
    choice = ModelChoice(encode(IdKind.CONFIGURED_MODEL, model))
    done = compiled(Definition("v1", "Go through the records of a list.", choice, {TOOL.name: tool}))
    await conn.execute(
        "insert into agent_configs (id, org_id, project_id, source, source_format, source_hash, definition, "
        "definition_hash, instruction_hash, configured_model_id) values ($1, $2, $3, '', 'yaml', '', $4, $5, $6, $7)",
        config, org, project, done.text, done.definition_hash, done.instruction_hash, model,
    )  # fmt: skip
    return Seeded(org, project, config, revision, ())


async def _key(conn: Any, ring: KeyRing, org_id: UUID) -> UUID:
    secret_id = new_uuid()
    await secrets.insert_secret(conn, secret_id, org_id, owner_kind="system", name="bench", description="")
    payload = msgspec.json.encode({SECRET_FIELD: "sk-bench"})
    sealed = seal(ring, payload, secret_aad(secret_id, 1))
    row = SealedRow(secret_id, "bench", 1, sealed.key_id, sealed.wrapped_key, sealed.nonce, sealed.ciphertext)
    await secrets.insert_version(conn, row, [SECRET_FIELD])
    return secret_id


async def _agents(conn: Any, made: Seeded, ids: tuple[UUID, ...], *, ready: bool) -> None:
    await conn.executemany(
        "insert into agents (id, org_id, project_id, name, current_config_id) values ($1, $2, $3, 'bench', $4)",
        [(agent, made.org_id, made.project_id, made.config_id) for agent in ids],
    )
    await conn.executemany(
        "insert into agent_sched (agent_id, project_id, config_id, next_rank, ready_at) "
        "values ($1, $2, $3, 2048, case when $4 then statement_timestamp() end)",
        [(agent, made.project_id, made.config_id, ready) for agent in ids],
    )


async def _open(conn: Any, ids: tuple[UUID, ...]) -> None:
    await conn.executemany(
        "insert into inputs (agent_id, id, kind, delivery_mode, state, rank, content) "
        "values ($1, $2, 'content', 'queued', 'received', 1024, $3)",
        [
            (agent, new_uuid(), msgspec.json.encode([{"type": "text", "text": opening_text(agent)}]).decode())
            for agent in ids
        ],
    )
