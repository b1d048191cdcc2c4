"""Images with properties of their own: they serve, or the person who named one is told why not. Hands from outside."""

from __future__ import annotations

import re

import pytest

from omnara.machines.providers.docker import DockerProvider
from omnara.machines.providers.protocol import ProviderUnavailable, ProvisionFailed
from tests.support.docker_engine import BUSYBOX_IMAGE, box, machine_spec, odd_image


async def test_what_an_image_says_of_itself_changes_nothing(provider: DockerProvider) -> None:
    changes = (
        'ENTRYPOINT ["/no/such"]', "USER nobody-here", "WORKDIR /not/there", "HEALTHCHECK CMD false",
        "ENV PATH= LC_ALL=x CDPATH=/bin V=1 SHELLOPTS=errexit", "VOLUME /data /home /run/omnara",
        "LABEL omnara.machine=other omnara.generation=99 omnara.role=guard",
    )  # fmt: skip
    with odd_image(*changes) as image:
        async with box(provider, image) as made:
            record, output = await made.run("pwd; echo $CDPATH$V; false; echo x >file; cat file")
            assert record.exit is not None
            assert (record.exit.state, output) == ("exited", "/home/agent\n\nx\n")
            kinds = [thing.kind for thing in await provider.owned(made.spec.installation_id)]
            assert kinds == ["container", "volume"], "one that says it is a guard is never swept"
            assert (await provider.provision(made.spec)).resource_id == made.resource.resource_id


@pytest.mark.parametrize(
    ("changes", "parts", "why"),
    [
        (("VOLUME /home/agent",), {}, "the image declares a volume at /home/agent: files there would be lost"),
        ((), {"shut": "home"}, "a container of this image cannot keep commands: there is no place"),
        ((), {"without": "sh"}, "ended as soon as it was started with 127: is there a /bin/sh in the image"),
    ],
    ids=["a volume in the way", "root's alone", "no shell"],
)
async def test_an_image_that_does_not_serve(
    provider: DockerProvider, changes: tuple[str, ...], parts: dict[str, str], why: str
) -> None:
    """Without a shell a container runs for a moment: taken for a machine in one of eight attempts, and made again."""
    with odd_image(*changes, **parts) as image:
        spec = machine_spec(image)
        try:
            for _ in range(5 if "without" in parts else 1):
                with pytest.raises(ProvisionFailed, match=re.escape(why)):
                    await provider.provision(spec)
                await provider.delete(spec, None)
        finally:
            await provider.delete(spec, None)


async def test_a_container_that_was_restarted_by_hand_has_its_routes_closed_again(provider: DockerProvider) -> None:
    async with box(provider, BUSYBOX_IMAGE, network="bridge") as made:
        async with provider.engine.call() as docker:
            await docker.containers.container(made.resource.resource_id).restart(timeout=0)
        _, routes = await made.run("ip route")
        assert "blackhole 169.254.0.0/16" in routes
        assert [thing.kind for thing in await provider.owned(made.spec.installation_id)] == ["container", "volume"]


@pytest.mark.parametrize(
    "address", ["tcp://127.0.0.1", "tcp://127.0.0.1:99999", "npipe:////./pipe/x", "127.0.0.1:1", ""]
)
async def test_an_address_that_leads_nowhere_is_told(address: str) -> None:
    provider = DockerProvider(address)
    try:
        with pytest.raises(ProviderUnavailable, match=r"Docker engine.*(port|Port|scheme|attribute)"):
            await provider.host()
    finally:
        await provider.close()
