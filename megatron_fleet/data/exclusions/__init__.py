"""Lists of tasks that are not worth playing, as data: one YAML file each, named in ``data.exclusions``.

A file has ``reason`` (a sentence), ``environments`` (whole environments) and ``tasks`` (keys); the last two may be left
out. ``megatron_fleet.data.exclusion`` reads them.
"""
