"""omnara: a server that runs AI agents durably, with Postgres as its only stateful part."""

__version__ = "0.1.0"
