"""`mfleet launch`: render, check, submit, follow and cancel jobs on this machine, Slurm, SkyPilot and Kubernetes.

The scripts and manifests are files in ``launch/`` that work by themselves; a launcher fills in what the section
`launch` of the configuration says. `job` has what all launchers share, `plan` makes a job of overrides,
`launch_command` is the command line, and each further module is one kind of launcher.
"""
