"""Starts the processes of a run, on this host or on others; base.py has the protocol."""
