"""`mfleet doctor`: probes of hosts and services before a run is started on them.

`probe` has the interface, `host`, `devices`, `network`, `services` and `model` the probes by subject, `meeting` brings
several hosts together, and `command` runs everything and prints the table.
"""
