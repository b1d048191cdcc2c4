"""The surface of daemons: what runs on somebody's machine dials in here with the token of that machine."""
