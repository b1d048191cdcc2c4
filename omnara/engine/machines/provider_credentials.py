"""By what a pool is known to its provider: the secret that the pool names, opened for one call and kept nowhere."""

from __future__ import annotations

from uuid import UUID

from omnara.db import provisioning as db
from omnara.engine.catalog import open_secret
from omnara.engine.deps import Deps
from omnara.machines.providers.protocol import Credential, NotAdmitted
from omnara.vault import SecretUnreadable

__all__ = ["credential_for"]


async def credential_for(deps: Deps, machine_id: UUID) -> Credential | None:
    """Return the credential of a machine's pool as it is now; None when the pool names none.

    One statement. Raises NotAdmitted when nobody can have it any more, Unavailable. Source: machines.md §12; contract
    (provider_auth_secret_id).
    """
    async with deps.db.acquire() as connection:
        named, sealed = await db.provider_secret(connection, machine_id)
    if not named:
        return None
    if sealed is None:
        raise NotAdmitted("the secret that the pool names as provider_auth_secret_id is gone")
    try:
        return Credential(open_secret(deps.ring, sealed))
    except SecretUnreadable:
        why = "the secret that the pool names as provider_auth_secret_id cannot be read with the server's keys"
        raise NotAdmitted(why) from None
