"""Studies behind the paper's tables and figures, run again from scratch."""
