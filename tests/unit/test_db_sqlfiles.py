"""Query files are found, split and refused as described."""

from __future__ import annotations

from pathlib import Path

import pytest

from omnara.db.sqlfiles import Queries, SqlFileError, parse_queries, query_groups, split_statements, sql_root

GOOD = """-- A header about the whole file.

-- name: one
-- Does a thing, and
-- says so. Index: t_pkey.
select ';' as a, $$ ; $$ as b; -- the end; really

-- name: two
-- Index: none.
with x as (select 1) -- note
select * from x
"""


def test_a_query_has_a_name_a_description_and_an_index(tmp_path: Path) -> None:
    (tmp_path / "queries").mkdir()
    (tmp_path / "queries" / "things.sql").write_text(GOOD)
    queries = Queries("things", root=tmp_path)
    assert list(queries) == ["one", "two"]
    one = queries.describe("one")
    assert (one.description, one.index) == ("Does a thing, and says so.", "t_pkey")
    assert queries["one"] == "/* things.one */ select ';' as a, $$ ; $$ as b"
    assert queries["two"].startswith("/* things.two */ with x")
    assert query_groups(tmp_path) == ("things",)
    with pytest.raises(SqlFileError, match=r"things\.three"):
        queries["three"]
    with pytest.raises(SqlFileError):
        queries.describe("three")
    with pytest.raises(SqlFileError):
        Queries("nothing", root=tmp_path)


@pytest.mark.parametrize(
    "source",
    [
        "-- name: a\nselect 1;\n-- name: a\nselect 2;",
        "-- name: a\n-- only words",
        "-- name: a\nselect 1; select 2;",
        "-- name: A-b\nselect 1",
        "select 1;\n-- name: a\nselect 1",
    ],
)
def test_mistakes_are_loud(source: str) -> None:
    with pytest.raises(SqlFileError):
        parse_queries("bad", source)


def test_every_shipped_file_reads() -> None:
    assert (sql_root() / "migrations").is_dir()
    for group in query_groups():
        for name in Queries(group):
            assert Queries(group).describe(name).description


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("select 1; select 2", ["select 1", "select 2"]),
        ("select 'a;''b'; select \"c;d\"", ["select 'a;''b'", 'select "c;d"']),
        ("do $x$ begin; end $x$; -- a;b\n/* c; */ select 1;;", ["do $x$ begin; end $x$", "-- a;b\n/* c; */ select 1"]),
        (" ; -- nothing\n ; ", []),
        ("select $1, 5-3, 6/2;", ["select $1, 5-3, 6/2"]),
    ],
)
def test_statements_are_split_at_real_semicolons(source: str, expected: list[str]) -> None:
    assert split_statements(source) == expected
