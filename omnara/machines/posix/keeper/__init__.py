"""What stays with a command when everybody else may die: the fork server and the keepers it forks.

Started as `python -I -S`, so this package imports nothing but a few small modules of the standard library, and nothing
late: a keeper goes on while the files of its installation are being replaced.
"""
