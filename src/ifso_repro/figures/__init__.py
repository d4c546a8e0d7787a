"""The figures of the paper, drawn from what ``ifso repro`` and ``ifso prune`` wrote."""
