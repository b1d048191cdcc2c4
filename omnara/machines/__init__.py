"""Processes on machines: the wire protocol, the one runtime that runs commands, and its homes.

Knows nothing of agents and of Postgres: what is here runs inside `omnara daemon` too, on somebody else's computer.
"""
