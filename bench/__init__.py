"""Benches: one module per scenario, each a bounded run against a real Postgres that ends by itself.

`python -m bench --help` lists the scenarios. Every figure is a ratio or a bound within one run on one machine
(DESIGN §9), because absolute rates of shared machines mean little. What is measured runs in child processes, so that
contestants share neither heap nor event loop; the parent only says when.
"""
