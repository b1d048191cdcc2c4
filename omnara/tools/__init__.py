"""What agents can do: the protocol of tools, the built-in ones, and the rules for everything they reach."""
