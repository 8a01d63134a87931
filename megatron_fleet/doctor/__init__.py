"""`mfleet doctor`: probes of hosts and services before a run is started on them.

`probe` has the interface, `host`, `devices`, `network`, `services` and `model` the probes by subject, `many_hosts`
brings several hosts together, and `doctor_command` runs everything and prints the table.
"""
