"""One page that shows what a pruning run removed, what it cost, and whether to trust it."""

from ifso.report.page import write_report

__all__ = ["write_report"]
