"""Environments, sizes and providers of machines: which fit together, without a database."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnara.db.machine_pools import PoolOverrides, PoolSettings, Sizes
from omnara.engine.machines.environment import MAX_BYTES, MAX_ENTRIES, check_env
from omnara.engine.machines.pool_providers import check_provider, known_provider
from omnara.engine.machines.pool_settings import applied, check_sizes, differing, narrowed
from omnara.errors import InvalidRequest, Unprocessable
from omnara.ids import new_uuid
from omnara.machines.providers.places import PLACES

some_size = st.none() | st.integers(1, 9)
sizes = st.builds(Sizes, **dict.fromkeys(Sizes.__struct_fields__, some_size))


def fits(kind: Sizes, what: str, value: int) -> bool:
    low, high = getattr(kind, f"min_machine_{what}"), getattr(kind, f"max_machine_{what}")
    return (low is None or value >= low) and (high is None or value <= high)


@given(sizes, sizes, st.integers(1, 9))
def test_what_a_grant_leaves_fits_both(pool: Sizes, grant: Sizes, value: int) -> None:
    both = narrowed(pool, grant)
    for what in ("cpu", "memory_mb"):
        assert fits(both, what, value) == (fits(pool, what, value) and fits(grant, what, value))
        usual = f"default_machine_{what}"
        assert getattr(both, usual) in {getattr(grant, usual), getattr(pool, usual)}
    assert narrowed(pool, Sizes()) == pool


@given(sizes)
def test_sizes_that_pass_leave_room(found: Sizes) -> None:
    try:
        check_sizes(found)
    except InvalidRequest:
        return
    for what in ("cpu", "memory_mb"):
        usual = getattr(found, f"default_machine_{what}")
        assert usual is None or fits(found, what, usual)
        assert any(fits(found, what, value) for value in range(1, 10))


def test_a_closed_pool_may_have_sizes() -> None:
    check_sizes(Sizes(max_total_cpu=0, default_machine_cpu=2, min_machine_cpu=1))


def test_an_environment_has_a_mebibyte() -> None:
    largest: dict[str, str | None] = {"A": "é" * (MAX_BYTES // 4), "B": "x" * (MAX_BYTES // 2 - 2), "C": None}
    with pytest.raises(InvalidRequest):
        check_env(largest, {})
    del largest["C"]
    check_env(largest, {"C": new_uuid()})


def test_entries_of_both_kinds_count() -> None:
    env: dict[str, str | None] = {f"A{n}": "" for n in range(MAX_ENTRIES - 1)}
    check_env(env, {"B": new_uuid()})
    with pytest.raises(InvalidRequest):
        check_env(env, {"B": new_uuid(), "C": None})


@pytest.mark.parametrize("name", ["", "1A", "A-B", "A B", "A=B", "É", "A\0", "A" * 256, "omnara_x", "A\n"])
def test_names_that_no_shell_can_have(name: str) -> None:
    with pytest.raises(InvalidRequest):
        check_env({name: "x"}, {})
    with pytest.raises(InvalidRequest):
        check_env({}, {name: None})


def test_changes_are_applied_and_compared_by_meaning() -> None:
    before = PoolSettings(name="a", max_total_machines=1, sizes=Sizes(), provider_config='{"b": 1, "a": 2}')
    after = applied(
        before, {"provider_config": {"a": 2, "b": 1}, "max_machine_cpu": 2, "default_machine_env": {"X": "1"}}
    )
    assert differing(before, after) == {"max_machine_cpu", "default_machine_env"}
    assert (after.sizes.max_machine_cpu, after.default_machine_env) == (2, '{"X":"1"}')
    overrides = applied(
        PoolOverrides(sizes=Sizes()), {"default_machine_env_overlay": {"X": None}, "metadata": {"a": "\0"}}
    )
    assert (overrides.default_machine_env_overlay, overrides.metadata) == ('{"X":null}', '{"a":"\ufffd"}')
    with pytest.raises(InvalidRequest):
        applied(after, {"default_machine_secret_env": {"x": new_uuid()}})


@pytest.mark.parametrize(
    ("name", "error"), [("unikraft", Unprocessable), ("daytona", Unprocessable), ("Docker", InvalidRequest)]
)
def test_providers_that_there_are_not(name: str, error: Any) -> None:
    with pytest.raises(error):
        known_provider(PLACES, name)


def test_what_providers_take() -> None:
    check_provider(PLACES, "docker", '{"image": "debian:12"}', "{}")
    check_provider(PLACES, "local", "{}", '{"network": "none"}')
    for provider, config, options in (
        ("docker", '{"network": "host"}', "{}"),
        ("docker", '{"image": 1}', "{}"),
        ("local", '{"image": "debian"}', "{}"),
        ("local", "{}", '{"network": "other"}'),
    ):
        with pytest.raises(InvalidRequest):
            check_provider(PLACES, provider, config, options)
