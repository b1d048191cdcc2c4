"""Everything that talks to Postgres. The only package that imports the driver, so that its rules are kept in one place.

Primitives: `connection` (how a session is set up), `pool` and `dedicated` (who holds which), `failures` (what an error
means), `locks`, `bus` and `hints` (coordination), `sqlfiles` and `migrate` (SQL in files), `pooler` and `selftest`
(is this database fit), `embedded` (a server of our own). Beside them one module per table group.
"""
