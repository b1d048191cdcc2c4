"""Puts a process together: opens the database, builds the shared parts once, runs the services by role."""

from omnara.app.serve import serve

__all__ = ["serve"]
