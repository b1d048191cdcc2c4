"""One module per built-in tool: its definition, and how it runs."""
