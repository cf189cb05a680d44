"""Export of a run: a folder of files that others load as they are.

It is not named for its command, since `windlass.export` is the call.
"""
