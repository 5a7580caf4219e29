"""The steps of a run, one a file: explore, freeze, confirm, export, report."""
