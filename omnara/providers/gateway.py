"""The one door to models: picks the adapter by wire format and owns what adapters share.

Source: DESIGN §5.
"""

from __future__ import annotations

from omnara.domain.stream import Sink
from omnara.providers import anthropic_messages, openai_chat, openai_responses
from omnara.providers.http import AddressCheck, ConnectorFactory, HttpPool
from omnara.providers.probe import ProbeResult, ProbeTarget, probe_models
from omnara.providers.protocol import Failed, ModelAdapter, ModelCall, Outcome
from omnara.providers.received import DEFAULT_BYTES, Received
from omnara.providers.streaming import HttpAdapter


class ModelGateway:
    """Makes attempts. Built without I/O; connections open with the first call."""

    def __init__(
        self,
        *,
        check_address: AddressCheck | None = None,
        connector_factory: ConnectorFactory | None = None,
        trust_env: bool = False,
        answers_bytes: int = DEFAULT_BYTES,
    ) -> None:
        """`check_address(host, ip, port)` returns why an address must not be dialled, or None; it also sees
        literal addresses. `connector_factory` replaces the connector and with it the check of resolved names.
        `answers_bytes` bounds what all answers being received hold together: see `Received`.
        """
        self._check_address = check_address
        self._pool = HttpPool(check_address=check_address, connector_factory=connector_factory, trust_env=trust_env)
        received = Received(answers_bytes)
        self._adapters: dict[str, ModelAdapter] = {
            anthropic_messages.API_FORMAT: HttpAdapter(anthropic_messages.AnthropicMessages(), self._pool, received),
            openai_chat.API_FORMAT: HttpAdapter(openai_chat.OpenAIChat(), self._pool, received),
            openai_responses.API_FORMAT: HttpAdapter(openai_responses.OpenAIResponses(), self._pool, received),
        }

    def register(self, api_format: str, adapter: ModelAdapter) -> None:
        """Use `adapter` for `api_format`, in place of any that is there. The gateway closes it."""
        self._adapters[api_format] = adapter

    async def call(self, call: ModelCall, sink: Sink | None = None) -> Outcome:
        """Make one attempt; see `ModelAdapter.call`. A format without adapter is a Failed like any other."""
        adapter = self._adapters.get(call.target.api_format)
        if adapter is None:
            return Failed(
                kind="invalid_request", message=f"the wire format {call.target.api_format!r} is not supported"
            )
        return await adapter.call(call, sink)

    async def probe(self, target: ProbeTarget) -> ProbeResult:
        """Ask an endpoint for its models, under the same rule for addresses as calls. See `probe_models`."""
        return await probe_models(target, check_address=self._check_address)

    async def close(self) -> None:
        """Close all adapters and connections. Calls must have ended or been cancelled before."""
        for adapter in {id(item): item for item in self._adapters.values()}.values():
            await adapter.close()
        await self._pool.close()
