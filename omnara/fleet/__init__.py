"""The machines' side of a server process: channels to runtimes, drivers of pool machines, provisioning, sweeps."""
