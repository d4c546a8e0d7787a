"""What must be removed together: record a run, follow the channels, build units, rehearse their removal."""
