"""The wire types of the scoped contract, one struct per schema and under the schema's own name.

They decode requests, encode responses and are what the OpenAPI document is built from, so the three cannot differ.
An optional field is `UNSET` when absent: the contract allows null only where a type says `None`.
Source: api.md §15 (optional fields are absent, never null).
"""
