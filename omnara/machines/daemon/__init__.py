"""`omnara daemon`: connects this computer to a server, so that its agents can run commands here.

It dials out and nothing dials in. Whatever it must not forget is in files below its home: commands outlive it, and the
next one goes on with them. Source: machines.md §2, §9, §10.
"""
