"""Report on a finished run, read from its folder: confidence intervals, error taxonomy, before/after comparison."""
