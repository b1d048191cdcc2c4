"""The demo: an agent that audits a folder while its server is killed with `kill -9`.

It stands outside the server on purpose: what it claims is counted at the model server, at a web page and in the
database through a read-only connection, never taken from the server's own word.
"""
