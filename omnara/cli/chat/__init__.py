"""`omnara chat`: a person and an agent in one terminal, or a pipe and an agent.

The log is the only truth here: a message is printed when it comes back as an event, an answer when its blocks are
complete, and after any disconnect the stream goes on behind the last event that was shown. `draft`, `blocks`, `forms`
and `activity` are pure; `screen` is the terminal; `session` joins them.
"""
